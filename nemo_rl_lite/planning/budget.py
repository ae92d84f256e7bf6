"""Known GPUs, the memory budget of a GPU and its host, and an engine's share of a GPU."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor

from nemo_rl_lite.config.algorithms import compares, generates, has_teacher
from nemo_rl_lite.config.engines import engine_of, engines_serve_adapters, engines_sleep
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import (
    SHARE_COLOCATED,
    bucket_size,
    engine_capacity,
    engine_share,
    engines,
    on_gpus,
    parallel_dims,
    policy_ranks,
    rollouts_in_flight,
    samples_per_step,
)
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.offload.residency import Component, Phase, Place, Residency
from nemo_rl_lite.planning.memory import (
    Bytes,
    Prediction,
    engine_weights,
    item_bytes,
    predict,
    shared_weights,
    token_cache_bytes,
    totals,
)
from nemo_rl_lite.planning.parameters import parameter_count, rank_parameters, served_adapters
from nemo_rl_lite.system import machine

# CUDA and NCCL contexts, captured graphs and torch's cached blocks (docs/benchmarks, plan-against-measured): with a
# colocated engine, with non-colocated engines, and without engines.
OVERHEAD_SHARED, OVERHEAD_APART, OVERHEAD_ALONE = 7 * 2**30, 5 * 2**30, 3 * 2**30
# Addition for a teacher's process: an assumption.
OVERHEAD_TEACHER = 2 * 2**30
# vLLM's working memory within its share: bytes, plus copies of a step's float32 logits.
WORKING, LOGITS = 2 * 2**30, 6
_GRAIN = 100
_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
GIB, MIB = 2**30, 2**20
ENGINE = (Component.GENERATION_WEIGHTS, Component.KV_CACHE)


@dataclass(frozen=True)
class Gpu:
    """A GPU model: name and MiB in nvidia-smi, dense bfloat16 FLOP/s, and memory bandwidth in bytes/s."""

    smi_name: str
    mib: int
    flops: float
    bandwidth: float
    decode_kernels: bool = False
    """True if engines decode by the kernels of `compat/vllm_decoding.py`, unless they have another backend."""


# Memory sizes of the H100 and the H200 are from nvidia-smi, other figures from the vendor. Variants, such as the H100
# PCIe, have other names and rates.
KNOWN = {
    "H100": Gpu("NVIDIA H100 80GB HBM3", 81559, 989e12, 3.35e12, decode_kernels=True),
    "H200": Gpu("NVIDIA H200", 143771, 989e12, 4.8e12, decode_kernels=True),
    "A100-80GB": Gpu("NVIDIA A100-SXM4-80GB", 81920, 312e12, 2.04e12),
    "A100-40GB": Gpu("NVIDIA A100-SXM4-40GB", 40960, 312e12, 1.56e12),
    "B200": Gpu("NVIDIA B200", 183359, 2250e12, 8e12),
    "A10": Gpu("NVIDIA A10", 23028, 125e12, 0.6e12),
    "L40S": Gpu("NVIDIA L40S", 46068, 362e12, 0.86e12),
    "RTX4090": Gpu("NVIDIA GeForce RTX 4090", 24564, 165e12, 1.01e12),
}
ASSUMED = "H100"


def parse_size(text: str) -> int:
    """Parse a size such as `80GiB` or `1.5 TB` to bytes. Raises ValueError: it is not a size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b)\s*", text.lower())
    if found is None or not float(found[1]):
        raise ValueError(f"'{text}' is not a size: give a number and a unit, such as 80GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def size_of(gpu: str | None) -> tuple[str, int]:
    """Return the name and bytes of `gpu` (a name or a size); without it, of this machine's smallest GPU or `ASSUMED`.

    Raises:
        ValueError: `gpu` is neither a known name nor a size.
    """
    if gpu is None:
        found = machine.gpu_bytes()
        return ("this machine's GPU", found) if found else (f"{ASSUMED} (assumed)", KNOWN[ASSUMED].mib * 2**20)
    wanted = re.sub(r"nvidia|[\W_]", "", gpu.lower())
    for name, known in KNOWN.items():
        # A100 is an A100-80GB, and H100-80GB an H100.
        family = name.lower().partition("-")[0]
        if wanted in (family, name.lower().replace("-", ""), f"{family}{round(known.mib / 1024)}gb"):
            return name, known.mib * 2**20
    try:
        return f"a GPU of {gpu}", parse_size(gpu)
    except ValueError:
        raise ValueError(f"'{gpu}' is neither a known GPU ({', '.join(KNOWN)}) nor a size such as 80GiB") from None


def speed_of(gpu_bytes: int) -> tuple[str, Gpu]:
    """Return the known GPU whose memory is closest to `gpu_bytes`, and its name."""
    name = min(KNOWN, key=lambda one: abs(KNOWN[one].mib * 2**20 - gpu_bytes))
    return name, KNOWN[name]


def known_by_name(name: str | None) -> Gpu | None:
    """Return the known GPU by its name in nvidia-smi."""
    return next((one for one in KNOWN.values() if one.smi_name == name), None)


# --- Budgets


@dataclass(frozen=True)
class Budget:
    """Bytes on the GPU of the policy rank with the highest peak, and on its host. `gpu_bytes`: None on CPUs."""

    prediction: Prediction
    buffers: dict[Phase, int]
    """Refit buffers by phase. The refit phase includes the policy's copies of shared weights, which the first refit
    frees."""
    overhead: int
    reference: int
    """Host memory of the reference weights of a rank."""
    ranks_per_host: int
    engine_room: int
    """Bytes of an engine's share minus its weights and one longest sequence; 0 without engines."""
    gpu_bytes: int | None

    @property
    def device(self) -> dict[Phase, int]:
        """Bytes on the GPU, by phase."""
        sums = totals(self.prediction)
        return {phase: sums[phase].device + buffers + self.overhead for phase, buffers in self.buffers.items()}

    @property
    def policy_buffers(self) -> int:
        """Refit buffers in the policy's process."""
        return min(self.buffers.values())

    @property
    def policy(self) -> dict[Phase, int]:
        """Bytes of torch's allocator in the policy's process, by phase."""
        sums = dict.fromkeys(self.device, self.policy_buffers)
        for (phase, component), nbytes in self.prediction.items():
            sums[phase] += 0 if component in ENGINE else nbytes.device
        return sums

    @property
    def peak_phase(self) -> Phase:
        return max(self.device, key=self.device.__getitem__)

    @property
    def host(self) -> int:
        """Peak host memory of all policy ranks of a machine. On CPUs it includes device bytes."""
        on_cpus = self.gpu_bytes is None
        most = max(sums.host + (sums.device if on_cpus else 0) for sums in totals(self.prediction).values())
        return self.ranks_per_host * (most + self.reference)

    @property
    def fits_device(self) -> bool:
        if self.gpu_bytes is None:
            return True
        return self.engine_room >= 0 and self.device[self.peak_phase] <= self.gpu_bytes


def budget(config: Config, shape: ModelShape, gpu_bytes: int | None) -> Budget:
    """Budget a configuration. `gpu_bytes` is None for a run on CPUs.

    Raises:
        ValueError: an engine shares a GPU whose size is not given.
    """
    ranks, prediction = policy_ranks(config), predict(config, shape, gpu_bytes)
    bucket = _refit_buffers(config, shape, gpu_bytes)
    # An engine that copies parameters needs a bucket in the first refit only.
    buffers = dict.fromkeys(totals(prediction), 0 if engines_copy(config) else bucket)
    own = max(shared_weights(config, shape, stage) for stage in range(parallel_dims(config).pp))
    if Phase.REFIT in buffers:
        buffers[Phase.REFIT] = bucket + own
    overhead, room = 0, 0
    if on_gpus(config):
        shared = Residency.of(config).engines_share_device
        overhead = OVERHEAD_SHARED if shared else OVERHEAD_APART if generates(config) else OVERHEAD_ALONE
        overhead += OVERHEAD_TEACHER if has_teacher(config) else 0
    if generates(config) and engine_of(config).takes_share and gpu_bytes is not None:
        longest = config.policy.max_total_sequence_length * token_cache_bytes(config, shape)
        room = int(engine_share(config.generation) * gpu_bytes) - engine_weights(config, shape) - longest
    per_host = min(-(-ranks // config.cluster.num_nodes), config.cluster.gpus_per_node or ranks)
    return Budget(prediction, buffers, overhead, _reference(config, shape), per_host, room, gpu_bytes)


def engines_copy(config: Config) -> bool:
    """Return whether engines copy the policy's parameters directly: each machine's GPUs hold the whole model."""
    dims, cluster = parallel_dims(config), config.cluster
    # On several machines, the pipeline stages of a replica are on different machines.
    pipeline_apart = cluster.num_nodes > 1 and dims.pp > 1
    together = dims.neighbours <= cluster.gpus_per_node and not pipeline_apart
    shared = Residency.of(config).engines_share_device
    return shared and config.refit.cuda_ipc and together and not merges_adapters(config)


def merges_adapters(config: Config) -> bool:
    """Return whether refits send weights with merged adapters, which the policy computes."""
    return config.policy.megatron_cfg.peft.enabled and not engines_serve_adapters(config.generation, config.policy)


def _refit_buffers(config: Config, shape: ModelShape, device_bytes: int | None) -> int:
    """Return the bytes of the buckets in flight, or of the first refit's bucket if engines copy. A bucket holds at
    least the largest tensor and at most the model."""
    if not generates(config) or device_bytes is None:
        return 0
    weights = refit_bytes(config, shape)
    largest = shape.vocabulary * shape.hidden * item_bytes(config)
    bucket = bucket_size(config.refit, device_bytes)
    bucket = min(max(bucket, largest), weights)
    count = 2 if Residency.of(config).engines_share_device else config.refit.num_buffers
    return min(1 if engines_copy(config) else count, -(-weights // bucket)) * bucket


def refit_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes of the weights that a refit transfers."""
    serves = engines_serve_adapters(config.generation, config.policy)
    elements = served_adapters(shape, config.policy.megatron_cfg.peft) if serves else parameter_count(shape)
    return elements * item_bytes(config)


def _reference(config: Config, shape: ModelShape) -> int:
    """Return the host bytes of the reference weights, and of the policy's weights while swapped out."""
    if not compares(config) or config.policy.megatron_cfg.peft.enabled:
        return 0
    dims = parallel_dims(config)
    return 2 * max(rank_parameters(shape, dims, stage).total for stage in range(dims.pp)) * item_bytes(config)


def chooses_share(config: Config) -> bool:
    """Return whether engines are colocated and their share of the GPU is `auto`."""
    shared = Residency.of(config).engines_share_device and engine_of(config).takes_share
    return shared and config.generation.vllm_cfg.gpu_memory_utilization == "auto"


def with_first_share(config: Config, shape: ModelShape, gpu_bytes: int) -> Config:
    """Return `config` with a share for all sequences, at most half of the GPU and enough for one sequence."""
    if not chooses_share(config):
        return config
    longest = config.policy.max_total_sequence_length
    least, all_of_them = (_needed(config, shape, tokens) for tokens in (longest, _running(config) * longest))
    share = max(least, min(all_of_them, SHARE_COLOCATED * gpu_bytes)) / gpu_bytes
    return _with_share(config, min(1, ceil(share * _GRAIN) / _GRAIN))


def with_more_share(config: Config, shape: ModelShape, gpu_bytes: int, used: float) -> Config:
    """Return `config` with a larger share than `with_first_share` for engines that sleep while the policy works.

    It is enough for all sequences if it fits into the share `used` of the GPU.
    """
    if not engines_sleep(config):
        return config
    first = engine_share(config.generation)
    room = used - budget(config, shape, gpu_bytes).device[Phase.GENERATE] / gpu_bytes
    needed = _needed(config, shape, _running(config) * config.policy.max_total_sequence_length) / gpu_bytes
    most = min(first + room, needed)
    return _with_share(config, max(first, floor(most * _GRAIN) / _GRAIN))


def _running(config: Config) -> int:
    """Return the number of sequences that an engine decodes at a time."""
    samples = samples_per_step(config) * rollouts_in_flight(config)
    return min(engine_capacity(config), -(-samples // engines(config)))


def _needed(config: Config, shape: ModelShape, tokens: int) -> int:
    weights = engine_weights(config, shape)
    logits = config.generation.vllm_cfg.max_num_seqs * shape.vocabulary * 4
    return weights + WORKING + LOGITS * logits + tokens * token_cache_bytes(config, shape)


def _with_share(config: Config, share: float) -> Config:
    generation = config.generation
    settings = replace(generation.vllm_cfg, gpu_memory_utilization=share)
    return replace(config, generation=replace(generation, vllm_cfg=settings))


def title(config: Config, shape: ModelShape, device_bytes: int | None) -> str:
    ranks = policy_ranks(config)
    whose = "the policy rank" if ranks == 1 else f"the policy rank (of {ranks}) with the highest peak"
    device = "a CPU" if not on_gpus(config) else "a GPU" if device_bytes is None else f"a GPU of {size(device_bytes)}"
    model = f"{config.policy.model_name} ({parameter_count(shape) / 1e6:,.0f} M parameters)"
    return f"predicted memory of {whose} on {device}: {model}"


def headers(residency: Residency) -> list[str]:
    return ["", *(phase.value for phase in residency.phases)]


def render(residency: Residency, prediction: Prediction) -> list[list[str]]:
    """Return the rows of the table: bytes and places of each component by phase, then sums."""
    rows = []
    for component in residency.components:
        cells = [_cell(residency.place(phase, component), prediction[phase, component]) for phase in residency.phases]
        rows.append([component.value.replace("_", " "), *cells])
    for where in ("device", "host"):
        sums = [getattr(totals(prediction)[phase], where) for phase in residency.phases]
        rows.append([f"sum on the {where}", *(size(one) if one else "-" for one in sums)])
    return rows


def size(nbytes: int) -> str:
    """Return `12.3 GiB`, or `513 MiB` below one."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def _cell(place: Place, nbytes: Bytes) -> str:
    if place is Place.RELEASED:
        return "-"
    parts = [(Place.DEVICE, nbytes.device), (Place.HOST, nbytes.host)]
    return "\n".join(f"{size(part)} {where}" for where, part in parts if part or where is place)


def last_that(holds: Callable[[int], bool], end: int) -> int | None:
    """Return the largest number in 0..end for which the monotone `holds` is true; None if there is none."""
    if not holds(0):
        return None
    low, high = 0, end
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
