"""The shape of a configuration: types and ranges only. `sections/` has those of its sections.

`configs/` is the only source of defaults, but for parts of what users add to it. Dataclasses are frozen, so that what a
run records is what it ran with.
"""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_rl_lite.config.sections.algorithm import (
    AlgorithmConfig,
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ORPOConfig,
    SFTConfig,
)
from nemo_rl_lite.config.sections.data import AgentConfig, DataConfig, EnvironmentConfig, RewardConfig
from nemo_rl_lite.config.sections.generation import GenerationConfig, RefitConfig
from nemo_rl_lite.config.sections.policy import PolicyConfig, TeacherConfig
from nemo_rl_lite.config.sections.run import CheckpointConfig, ClusterConfig, LoggerConfig, ProfileConfig
from nemo_rl_lite.config.sections.types import RUN_NAME, STRICT, ActiveIf


@dataclass(frozen=True, config=STRICT)
class Config:
    run_name: Annotated[str, Field(pattern=RUN_NAME)]
    algorithm: Annotated[
        GRPOConfig | SFTConfig | DPOConfig | ORPOConfig | KTOConfig | DistillationConfig, Field(discriminator="name")
    ]
    policy: PolicyConfig
    teacher: Annotated[TeacherConfig, ActiveIf("a teacher")]
    generation: Annotated[GenerationConfig, ActiveIf("an algorithm that generates")]
    refit: Annotated[RefitConfig, ActiveIf("an algorithm that generates")]
    data: DataConfig
    reward: Annotated[RewardConfig, ActiveIf("an algorithm that generates")]
    environment: Annotated[EnvironmentConfig, ActiveIf("an algorithm that generates"), ActiveIf("environment.name")]
    agent: Annotated[AgentConfig, ActiveIf("an algorithm that generates"), ActiveIf("agent.name")]
    cluster: ClusterConfig
    logger: LoggerConfig
    profile: ProfileConfig
    checkpoint: CheckpointConfig

    def options[T: AlgorithmConfig](self, kind: type[T]) -> T:
        """The algorithm's options, which the caller knows to be of `kind`. Raises TypeError: they are not."""
        if not isinstance(self.algorithm, kind):
            raise TypeError(f"{kind.__name__} expected, this run has {type(self.algorithm).__name__}")
        return self.algorithm
