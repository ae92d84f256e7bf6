"""How a run is run: its machines, logs, profiles and checkpoints."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_rl_lite.config.sections.types import DURATION, STRICT, NonNegativeInt, PositiveInt, Seconds


@dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    num_nodes: PositiveInt
    gpus_per_node: NonNegativeInt
    cpu_ranks: PositiveInt
    threads_per_worker: PositiveInt | None
    numa_binding: bool
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
    mismatch_warning: Annotated[float, Field(ge=1)]
    log_samples: NonNegativeInt | None
    show_samples_period: NonNegativeInt
    wandb: WandbConfig
    mlflow: MLflowConfig


@dataclass(frozen=True, config=STRICT)
class ProfileConfig:
    steps: list[PositiveInt]
    tool: Literal["torch", "nsys"]


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    save_period: NonNegativeInt
    async_save: bool
    resume_layouts: Literal["any", "data_parallel"]
    keep_newest: PositiveInt
    keep_best: NonNegativeInt
    must_save_by: PositiveInt | Annotated[str, Field(pattern=DURATION)] | None
    resume_from: Annotated[str, Field(min_length=1)] | None
    export_hf_at_end: bool
