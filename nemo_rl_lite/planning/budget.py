"""Add refit buffers and overhead to predicted components: whether a configuration fits a GPU and its host; the table
of it; an engine's share of a GPU, where that is left to `auto`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor

from nemo_rl_lite.config.algorithms import compares, generates, has_teacher
from nemo_rl_lite.config.engines import engine_of, engines_serve_adapters, engines_sleep
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import (
    SHARE_COLOCATED,
    engine_share,
    engines,
    on_gpus,
    parallel_dims,
    policy_ranks,
    samples_per_step,
)
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.offload.residency import Component, Phase, Place, Residency
from nemo_rl_lite.planning.memory import (
    Bytes,
    Prediction,
    engine_weights,
    item_bytes,
    parameter_count,
    predict,
    rank_parameters,
    served_adapters,
    shared_weights,
    token_cache_bytes,
    totals,
)

# The overhead of CUDA and NCCL contexts, captured graphs and torch's cached blocks as measured on H100s and H200s
# (docs/benchmarks, plan-against-measured): with an engine on the GPU, with engines on other GPUs, and without engines.
OVERHEAD_SHARED, OVERHEAD_APART, OVERHEAD_ALONE = 7 * 2**30, 5 * 2**30, 3 * 2**30
# That of a teacher's process in addition is assumed; nobody has measured it.
OVERHEAD_TEACHER = 2 * 2**30
# vLLM's own working memory, which is part of its share: bytes, and copies of a step's float32 logits.
WORKING, LOGITS = 2 * 2**30, 6
_GRAIN = 100
GIB, MIB = 2**30, 2**20
ENGINE = (Component.GENERATION_WEIGHTS, Component.KV_CACHE)


@dataclass(frozen=True)
class Budget:
    """Bytes of the fullest policy rank's GPU and of its host's memory. `gpu_bytes` is None for a run on CPUs."""

    prediction: Prediction
    buffers: dict[Phase, int]
    """Buffers of the refit, by phase. The phase of the refit also has the policy's own copies of weights that an engine
    shares with it, which it frees before the first."""
    overhead: int
    reference: int
    """Host memory of a rank's reference weights."""
    ranks_per_host: int
    engine_room: int
    """What an engine's share of its GPU leaves after its weights and one longest sequence; 0 without engines."""
    gpu_bytes: int | None

    @property
    def device(self) -> dict[Phase, int]:
        """Bytes on the GPU, by phase."""
        sums = totals(self.prediction)
        return {phase: sums[phase].device + buffers + self.overhead for phase, buffers in self.buffers.items()}

    @property
    def policy_buffers(self) -> int:
        """Refit buffers in the policy's process. An engine that copies parameters has a buffer only during a refit."""
        return min(self.buffers.values())

    @property
    def policy(self) -> dict[Phase, int]:
        """Bytes that torch's allocator holds in the policy's process, by phase."""
        sums = dict.fromkeys(self.device, self.policy_buffers)
        for (phase, component), nbytes in self.prediction.items():
            sums[phase] += 0 if component in ENGINE else nbytes.device
        return sums

    @property
    def fullest(self) -> Phase:
        return max(self.device, key=self.device.__getitem__)

    @property
    def host(self) -> int:
        """Host memory of all policy ranks of a machine, in the fullest phase. On CPUs it includes the device bytes."""
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
    own = max(shared_weights(config, shape, stage) for stage in range(parallel_dims(config).pp))
    return Budget(
        prediction,
        # An engine that copies parameters needs a bucket only at the first refit.
        {phase: (0 if copied else buffers) if phase is not Phase.REFIT else buffers + own for phase in phases},
        _overhead(config),
        _reference(config, shape),
        min(-(-ranks // config.cluster.num_nodes), config.cluster.gpus_per_node or ranks),
        _engine_room(config, shape, gpu_bytes),
        gpu_bytes,
    )


def engines_copy(config: Config) -> bool:
    """Whether engines copy the policy's parameters directly: the GPUs of one machine hold the whole model."""
    dims, cluster = parallel_dims(config), config.cluster
    # Pipeline stages are furthest apart: on several machines, each machine has stages of every replica.
    pipeline_apart = cluster.num_nodes > 1 and dims.pp > 1
    together = dims.neighbours <= cluster.gpus_per_node and not pipeline_apart
    shared = Residency.of(config).engines_share_device
    merges = config.policy.megatron_cfg.peft.enabled and not engines_serve_adapters(config.generation, config.policy)
    return shared and config.refit.direct and together and not merges


def _overhead(config: Config) -> int:
    if not on_gpus(config):
        return 0
    teacher = OVERHEAD_TEACHER if has_teacher(config) else 0
    if Residency.of(config).engines_share_device:
        return OVERHEAD_SHARED + teacher
    return teacher + (OVERHEAD_APART if generates(config) else OVERHEAD_ALONE)


def _refit_buffers(config: Config, shape: ModelShape, device_bytes: int | None) -> int:
    """Bytes of the buckets in flight, or of the first refit's bucket in an engine that copies. A bucket is at most the
    model, and at least its largest tensor."""
    if not generates(config) or device_bytes is None:
        return 0
    weights = refit_bytes(config, shape)
    largest = shape.vocabulary * shape.hidden * item_bytes(config)
    # It imports torch, and a plan of a run on CPUs needs none.
    from nemo_rl_lite.refit.layout import bucket_size

    bucket = bucket_size(device_bytes, config.refit.buffer_memory_ratio, config.refit.bucket_bytes)
    bucket = min(max(bucket, largest), weights)
    count = 2 if Residency.of(config).engines_share_device else config.refit.num_buffers
    return min(1 if engines_copy(config) else count, -(-weights // bucket)) * bucket


def refit_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of the weights that a refit transfers."""
    serves = engines_serve_adapters(config.generation, config.policy)
    elements = served_adapters(shape, config.policy.megatron_cfg.peft) if serves else parameter_count(shape)
    return elements * item_bytes(config)


def _engine_room(config: Config, shape: ModelShape, gpu_bytes: int | None) -> int:
    if not generates(config) or not engine_of(config).takes_share or gpu_bytes is None:
        return 0
    weights = engine_weights(config, shape)
    longest = config.policy.max_total_sequence_length * token_cache_bytes(config, shape)
    return int(engine_share(config.generation) * gpu_bytes) - weights - longest


def _reference(config: Config, shape: ModelShape) -> int:
    """Bytes of the reference weights in host memory, and of the policy's own weights while they are swapped out."""
    if not compares(config) or config.policy.megatron_cfg.peft.enabled:
        return 0
    dims = parallel_dims(config)
    # The policy's own weights are on the host while the reference weights take their place on the device.
    return 2 * max(rank_parameters(shape, dims, stage).total for stage in range(dims.pp)) * item_bytes(config)


def chooses_share(config: Config) -> bool:
    """Whether the run's engines share GPUs with the policy and their share is left to `auto`."""
    shared = Residency.of(config).engines_share_device and engine_of(config).takes_share
    return shared and config.generation.vllm_cfg.gpu_memory_utilization == "auto"


def with_first_share(config: Config, shape: ModelShape, gpu_bytes: int) -> Config:
    """`config` with the share that all sequences need, up to half of the GPU, and no less than one sequence needs."""
    if not chooses_share(config):
        return config
    longest = config.policy.max_total_sequence_length
    least, all_of_them = (_needed(config, shape, tokens) for tokens in (longest, _running(config) * longest))
    share = max(least, min(all_of_them, SHARE_COLOCATED * gpu_bytes)) / gpu_bytes
    return _with_share(config, min(1, ceil(share * _GRAIN) / _GRAIN))


def with_more_share(config: Config, shape: ModelShape, gpu_bytes: int, used: float) -> Config:
    """`config`, whose share is `with_first_share`'s, with more of it for engines that sleep while the policy works: as
    much as all sequences need and `used` of the GPU has room for."""
    if not engines_sleep(config):
        return config
    first = engine_share(config.generation)
    room = used - budget(config, shape, gpu_bytes).device[Phase.GENERATE] / gpu_bytes
    needed = _needed(config, shape, _running(config) * config.policy.max_total_sequence_length) / gpu_bytes
    most = min(first + room, needed)
    return _with_share(config, max(first, floor(most * _GRAIN) / _GRAIN))


def _running(config: Config) -> int:
    """Sequences that an engine decodes at a time."""
    return min(config.generation.vllm_cfg.max_num_seqs, -(-samples_per_step(config) // engines(config)))


def _needed(config: Config, shape: ModelShape, tokens: int) -> int:
    weights = engine_weights(config, shape)
    logits = config.generation.vllm_cfg.max_num_seqs * shape.vocabulary * 4
    return weights + WORKING + LOGITS * logits + tokens * token_cache_bytes(config, shape)


def _with_share(config: Config, share: float) -> Config:
    generation = config.generation
    settings = replace(generation.vllm_cfg, gpu_memory_utilization=share)
    return replace(config, generation=replace(generation, vllm_cfg=settings))


def title(config: Config, shape: ModelShape, device_bytes: int | None) -> str:
    """The table's title: which rank, which device, which model."""
    ranks = policy_ranks(config)
    whose = "the policy rank" if ranks == 1 else f"the fullest of {ranks} policy ranks"
    device = "a CPU" if not on_gpus(config) else "a GPU" if device_bytes is None else f"a GPU of {size(device_bytes)}"
    model = f"{config.policy.model_name} ({parameter_count(shape) / 1e6:,.0f} M parameters)"
    return f"predicted memory of {whose} on {device}: {model}"


def headers(residency: Residency) -> list[str]:
    """The table's column headers: one per phase."""
    return ["", *(phase.value for phase in residency.phases)]


def render(residency: Residency, prediction: Prediction) -> list[list[str]]:
    """The table's rows: each component's bytes and places by phase, then sums."""
    rows = [
        [
            component.value.replace("_", " "),
            *(_cell(residency.place(phase, component), prediction[phase, component]) for phase in residency.phases),
        ]
        for component in residency.components
    ]
    sums = totals(prediction)
    return [
        *rows,
        ["sum on the device", *(size(sums[phase].device) if sums[phase].device else "-" for phase in residency.phases)],
        ["sum on the host", *(size(sums[phase].host) if sums[phase].host else "-" for phase in residency.phases)],
    ]


def size(nbytes: int) -> str:
    """`12.3 GiB`, or `513 MiB` below one."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def _cell(place: Place, nbytes: Bytes) -> str:
    """One line for each place that holds a part of the component; only the place if it holds 0 bytes."""
    if place is Place.RELEASED:
        return "-"
    parts = [(Place.DEVICE, nbytes.device), (Place.HOST, nbytes.host)]
    return "\n".join(f"{size(part)} {where}" for where, part in parts if part or where is place)


def last_that(holds: Callable[[int], bool], end: int) -> int | None:
    """Return the largest number of 0..end for which the monotone `holds` is true; None if it is false for 0."""
    if not holds(0):
        return None
    low, high = 0, end
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
