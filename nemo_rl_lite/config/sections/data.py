"""What a run trains on: data, rewards, environments and agents."""

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_rl_lite.config.sections.types import STRICT, ActiveIf, PositiveFloat, PositiveInt


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    name: str
    train_path: Annotated[str | None, ActiveIf(".name", "file")]
    validation_path: Annotated[str | None, ActiveIf(".name", "file")]
    path: Annotated[str | None, ActiveIf(".name", "hub")]
    subset: Annotated[str | None, ActiveIf(".name", "hub")]
    train_split: Annotated[str, ActiveIf(".name", "hub")]
    validation_split: Annotated[str | None, ActiveIf(".name", "hub")]
    task: Annotated[str | None, ActiveIf(".name", "reasoning_gym")]
    task_kwargs: dict[str, Any]
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    prompt_column: str
    prompt_template: str | None
    answer_column: str | None
    answer_pattern: Annotated[str | None, ActiveIf("as data", "problems")]
    response_column: str | None
    messages_column: str | None
    tools_column: str | None
    train_on: Annotated[Literal["all", "last"], ActiveIf("as data", "chats")]
    chosen_column: Annotated[str, ActiveIf("as data", "pairs")]
    rejected_column: Annotated[str, ActiveIf("as data", "pairs")]
    label_column: Annotated[str, ActiveIf("as data", "unpaired")]
    system_prompt: str | None
    min_reward: float | None
    shuffle: bool
    too_long: Literal["error", "drop", "truncate"]


@dataclass(frozen=True, config=STRICT)
class RewardTerm:
    name: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(allow_inf_nan=False)]
    kwargs: dict[str, Any] = Field(default_factory=dict)
    batch_size: PositiveInt | None = None


@dataclass(frozen=True, config=STRICT)
class RewardConfig:
    name: Annotated[str, Field(min_length=1)]
    kwargs: dict[str, Any]
    batch_size: PositiveInt | None
    terms: dict[Annotated[str, Field(pattern=r"^\w+$")], RewardTerm]
    timeout_s: PositiveFloat | None
    processes: Annotated[int, Field(gt=0, le=4096), ActiveIf(".timeout_s")]
    concurrency: Annotated[int, Field(gt=0, le=4096), ActiveIf(".timeout_s")]
    max_error_share: Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class EnvironmentConfig:
    name: Annotated[str, Field(min_length=1)] | None
    max_turns: PositiveInt
    timeout_s: PositiveFloat | None
    concurrency: PositiveInt
    processes: Annotated[int, Field(gt=0, le=4096)]
    max_error_share: Annotated[float, Field(ge=0, le=1)]
    kwargs: dict[str, Any]


@dataclass(frozen=True, config=STRICT)
class AgentConfig:
    name: Annotated[str, Field(min_length=1)] | None
    timeout_s: PositiveFloat | None
    concurrency: PositiveInt
    processes: Annotated[int, Field(gt=0, le=4096)]
    max_error_share: Annotated[float, Field(ge=0, le=1)]
    kwargs: dict[str, Any]
