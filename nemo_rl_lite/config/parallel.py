"""How a policy's ranks are split: the one place where parallel sizes are multiplied. Imports nothing heavy.

The order of ranks is megatron-core's: tensor-parallel neighbours first, then context parallel, data parallel, and
pipeline stages furthest apart. Experts are spread over the ranks of a pipeline stage; a tensor-parallel group does not
split single experts.
"""

from dataclasses import dataclass

from nemo_rl_lite.config.sections.policy import MegatronConfig


@dataclass(frozen=True)
class ParallelDims:
    """Sizes in ranks: tensor, pipeline, context and expert parallel, and `world`, all policy ranks."""

    tp: int
    pp: int
    cp: int
    ep: int
    world: int
    first_layers: int | None = None
    """Layers of the first pipeline stage; None for as many as the stages have of which nothing is said."""
    last_layers: int | None = None

    @classmethod
    def of(cls, parallel: MegatronConfig, world: int) -> "ParallelDims":
        """How `world` ranks are split."""
        return cls(
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            cp=parallel.context_parallel_size,
            ep=parallel.expert_model_parallel_size,
            world=world,
            first_layers=parallel.num_layers_in_first_pipeline_stage,
            last_layers=parallel.num_layers_in_last_pipeline_stage,
        )

    @property
    def replica(self) -> int:
        """Ranks that have the model once, outside experts."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Data-parallel replicas; 0 where the ranks are too few for one."""
        return self.world // self.replica

    @property
    def dense_dp(self) -> int:
        """Ranks of a stage that have the same weights outside experts, and average their gradients; at least 1."""
        return max(1, self.dp * self.cp)

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    @property
    def expert_dp(self) -> int:
        """Ranks of a stage that have the same experts, at least 1."""
        return max(1, self.stage // self.ep)

    @property
    def fills_world(self) -> bool:
        """Whether whole replicas use all ranks."""
        return self.world > 0 and self.world % self.replica == 0

    @property
    def splits_weights(self) -> bool:
        """Whether a rank has only a part of the weights. Context parallelism splits none."""
        return self.tp * self.pp * self.ep > 1

    @property
    def neighbours(self) -> int:
        """Consecutive ranks of a stage that have its weights between them."""
        return max(self.tp, self.ep)

    def ranks_of_stage(self, stage: int) -> range:
        """The ranks of pipeline stage `stage`, from 0."""
        return range(stage * self.stage, (stage + 1) * self.stage)

    def stage_layers(self, layers: int) -> list[int]:
        """How many of a model's layers each pipeline stage has.

        Raises:
            ValueError: they cannot be spread like this.
        """
        if self.pp == 1:
            return [layers]
        told = {stage: count for stage, count in ((0, self.first_layers), (self.pp - 1, self.last_layers)) if count}
        rest, others = layers - sum(told.values()), self.pp - len(told)
        if rest < others or (rest % others if others else rest):
            raise ValueError(f"{layers} layers cannot be spread over {self.pp} pipeline stages")
        return [told[stage] if stage in told else rest // others for stage in range(self.pp)]

    def stage_and_replica(self, rank: int) -> tuple[int, int]:
        """The pipeline stage and the data-parallel replica of a rank."""
        return rank // self.stage, rank // (self.tp * self.cp) % self.dp
