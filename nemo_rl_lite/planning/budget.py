"""Whether a configuration fits a GPU and its host: the predicted components and what there is beside them."""

from dataclasses import dataclass

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus, policy_ranks
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.offload.residency import Component, Phase, Residency
from nemo_rl_lite.planning.activation_size import item_bytes
from nemo_rl_lite.planning.model_size import parameter_count, rank_parameters
from nemo_rl_lite.planning.prediction import Prediction, predict, totals
from nemo_rl_lite.refit.layout.plan import bucket_size

# What contexts of CUDA and NCCL, captured graphs and blocks that torch keeps took beside all components on H100s and
# H200s (docs/benchmarks, plan-against-measured): with an engine on the GPU, with engines on others, and without any.
OVERHEAD_SHARED, OVERHEAD_APART, OVERHEAD_ALONE = 7 * 2**30, 5 * 2**30, 3 * 2**30
ENGINE = (Component.GENERATION_WEIGHTS, Component.KV_CACHE)


@dataclass(frozen=True)
class Budget:
    """Bytes of the fullest policy rank's GPU and of its host's memory. `gpu_bytes` is None for a run on CPUs."""

    prediction: Prediction
    buffers: dict[Phase, int]
    """The refit's."""
    overhead: int
    reference: int
    """Host memory of a rank's reference weights."""
    ranks_per_host: int
    engine_room: int
    """Of an engine's share of its GPU, what its weights and one of the longest sequences leave; 0 without engines."""
    gpu_bytes: int | None

    @property
    def device(self) -> dict[Phase, int]:
        """All there is on the GPU, by phase."""
        sums = totals(self.prediction)
        return {phase: sums[phase].device + buffers + self.overhead for phase, buffers in self.buffers.items()}

    @property
    def policy_buffers(self) -> int:
        """Those that the policy's process has: it keeps them, and an engine that copies has its own for a refit."""
        return min(self.buffers.values())

    @property
    def policy(self) -> dict[Phase, int]:
        """What torch's allocator holds in the policy's process, by phase."""
        sums = dict.fromkeys(self.device, self.policy_buffers)
        for (phase, component), nbytes in self.prediction.items():
            sums[phase] += 0 if component in ENGINE else nbytes.device
        return sums

    @property
    def fullest(self) -> Phase:
        return max(self.device, key=self.device.__getitem__)

    @property
    def host(self) -> int:
        """Of a machine's policy ranks together, in the phase that takes most; on CPUs that is where everything is."""
        on_cpus = self.gpu_bytes is None
        most = max(sums.host + (sums.device if on_cpus else 0) for sums in totals(self.prediction).values())
        return self.ranks_per_host * (most + self.reference)

    @property
    def fits_device(self) -> bool:
        if self.gpu_bytes is None:
            return True
        return self.engine_room >= 0 and self.device[self.fullest] <= self.gpu_bytes


def budget(config: Config, shape: ModelShape, gpu_bytes: int | None) -> Budget:
    """`gpu_bytes` is None for a run on CPUs.

    Raises:
        ValueError: an engine shares a GPU whose size is not given.
    """
    ranks = policy_ranks(config)
    prediction, copied = predict(config, shape, gpu_bytes), engines_copy(config)
    buffers, phases = _refit_buffers(config, shape, gpu_bytes), totals(prediction)
    return Budget(
        prediction,
        # An engine that copies has its bucket at the first refit alone.
        {phase: 0 if copied and phase is not Phase.REFIT else buffers for phase in phases},
        _overhead(config),
        _reference(config, shape),
        min(-(-ranks // config.cluster.num_nodes), config.cluster.gpus_per_node or ranks),
        _engine_room(config, shape, gpu_bytes),
        gpu_bytes,
    )


def engines_copy(config: Config) -> bool:
    """Whether engines copy the policy's parameters, where those of one machine have the whole model between them."""
    parallel, cluster = config.policy.megatron_cfg, config.cluster
    neighbours = max(parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size)
    # megatron-core puts pipeline stages furthest apart: on several machines each has stages of every replica.
    pipeline_apart = cluster.num_nodes > 1 and parallel.pipeline_model_parallel_size > 1
    together = neighbours <= cluster.gpus_per_node and not pipeline_apart
    shared = Residency.of(config).engines_share_device
    return shared and config.refit.direct and together and not parallel.peft.enabled


def _overhead(config: Config) -> int:
    if not on_gpus(config):
        return 0
    if Residency.of(config).engines_share_device:
        return OVERHEAD_SHARED
    return OVERHEAD_APART if config.algorithm.name == "grpo" else OVERHEAD_ALONE


def _refit_buffers(config: Config, shape: ModelShape, device_bytes: int | None) -> int:
    """Bytes of the buckets that are on their way at a time, or of that which an engine takes to begin with; none larger
    than the model, none smaller than its largest tensor."""
    if config.algorithm.name != "grpo" or device_bytes is None:
        return 0
    weights = refit_bytes(config, shape)
    largest = shape.vocabulary * shape.hidden * item_bytes(config)
    bucket = bucket_size(device_bytes, config.refit.buffer_memory_ratio, config.refit.bucket_bytes)
    bucket = min(max(bucket, largest), weights)
    count = 2 if Residency.of(config).engines_share_device else config.refit.num_buffers
    return min(1 if engines_copy(config) else count, -(-weights // bucket)) * bucket


def refit_bytes(config: Config, shape: ModelShape) -> int:
    """The model's weights, as each refit carries them."""
    return parameter_count(shape) * item_bytes(config)


def a_token_of_cache(config: Config, shape: ModelShape) -> int:
    """Bytes that a token takes of the KV cache on one GPU of an engine."""
    own_heads = -(-shape.kv_heads // config.generation.vllm_cfg.tensor_parallel_size)
    return 2 * shape.layers * own_heads * shape.head_dim * item_bytes(config)


def _engine_room(config: Config, shape: ModelShape, gpu_bytes: int | None) -> int:
    settings = config.generation.vllm_cfg
    if config.algorithm.name != "grpo" or config.generation.backend != "vllm" or gpu_bytes is None:
        return 0
    weights = refit_bytes(config, shape) // settings.tensor_parallel_size
    longest = config.policy.max_total_sequence_length * a_token_of_cache(config, shape)
    return int(settings.gpu_memory_utilization * gpu_bytes) - weights - longest


def _reference(config: Config, shape: ModelShape) -> int:
    """Bytes of the starting weights that wait in host memory for the policy to be compared with, and of their place."""
    algorithm, parallel = config.algorithm, config.policy.megatron_cfg
    compared = algorithm.name == "dpo" or (
        algorithm.name == "grpo" and config.grpo.loss_fn.reference_policy_kl_penalty > 0
    )
    if not compared or parallel.peft.enabled:
        return 0
    last = parallel.pipeline_model_parallel_size - 1
    # And the policy's own, while they take its place.
    return 2 * max(rank_parameters(shape, parallel, stage).total for stage in {0, last}) * item_bytes(config)
