"""How a run is run: its machines, logs, profiles and checkpoints."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_rl_lite.config.sections.types import (
    DURATION,
    STRICT,
    ActiveIf,
    NonNegativeInt,
    NullIsEmpty,
    PositiveInt,
    Seconds,
)


@dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    num_nodes: PositiveInt
    gpus_per_node: NonNegativeInt
    cpu_ranks: Annotated[PositiveInt, ActiveIf("CPUs")]
    threads_per_worker: PositiveInt | None
    numa_binding: Annotated[bool, ActiveIf("GPUs")]
    start_timeout_s: Seconds
    collective_timeout_s: Seconds
    phase_timeout_s: Seconds | None
    max_restarts: NonNegativeInt


@dataclass(frozen=True, config=STRICT)
class WandbConfig:
    project: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)] | None
    entity: str | None
    mode: Literal["online", "offline"]


@dataclass(frozen=True, config=STRICT)
class MLflowConfig:
    tracking_uri: Annotated[str, Field(min_length=1)]
    experiment: Annotated[str, Field(min_length=1)]
    name: str | None


@dataclass(frozen=True, config=STRICT)
class LoggerConfig:
    wandb_enabled: bool
    tensorboard_enabled: bool
    mlflow_enabled: bool
    plots: bool
    mismatch_warning: Annotated[float, Field(ge=1), ActiveIf("an algorithm that generates")]
    log_samples: Annotated[NonNegativeInt | None, ActiveIf("an algorithm that generates")]
    show_samples_period: Annotated[NonNegativeInt, ActiveIf("an algorithm that generates")]
    wandb: Annotated[WandbConfig, ActiveIf(".wandb_enabled")]
    mlflow: Annotated[MLflowConfig, ActiveIf(".mlflow_enabled")]


@dataclass(frozen=True, config=STRICT)
class ProfileConfig:
    steps: Annotated[list[PositiveInt], NullIsEmpty]
    tool: Annotated[Literal["torch", "nsys"], ActiveIf(".steps")]


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    save_period: NonNegativeInt
    async_save: Annotated[bool, ActiveIf(".save_period")]
    resume_layouts: Annotated[Literal["any", "data_parallel"], ActiveIf(".save_period")]
    keep_newest: Annotated[PositiveInt, ActiveIf(".save_period")]
    keep_best: Annotated[NonNegativeInt, ActiveIf(".save_period"), ActiveIf("validations")]
    must_save_by: PositiveInt | Annotated[str, Field(pattern=DURATION)] | None
    resume_from: Annotated[str, Field(min_length=1)] | None
    export_hf_at_end: bool
