"""Start the workers that a configuration asks for, and connect them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_rl_lite.cluster.placement import Placement, place
from nemo_rl_lite.cluster.runtime import available_cores
from nemo_rl_lite.cluster.workers import Call, WorkerGroup, wait
from nemo_rl_lite.config.algorithms import compares, generates
from nemo_rl_lite.config.automatic import generates_ahead
from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import (
    engine_ranks,
    engines,
    micro_batch_sizes,
    on_gpus,
    parallel_dims,
    policy_ranks,
    sequences_per_optimizer_step,
    sequences_together,
)
from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.host.devices import ON_CPUS
from nemo_rl_lite.models.shape import described_shape
from nemo_rl_lite.observability.timer import Timer, seconds_since_command
from nemo_rl_lite.offload import activations
from nemo_rl_lite.offload.residency import Residency
from nemo_rl_lite.planning.flops import SequenceFlops
from nemo_rl_lite.policy.megatron.micro_batches import Layout
from nemo_rl_lite.run.workers.recovery import RecoveringGeneration
from nemo_rl_lite.run.workers.remote_generation import RemoteGeneration
from nemo_rl_lite.run.workers.remote_policy import WORKER_CLASS, RemotePolicy
from nemo_rl_lite.run.workers.weight_sync import ProbeSettings, WeightSync

log = logging.getLogger(__name__)

# megatron-core compiles a few fused functions. On a CPU that delays the first batch by seconds and gains nothing.
CPU_POLICY_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1"}
_SEGMENTS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# The number of hardware work queues of a process. With a single queue, a copy that waits for an earlier copy also
# delays kernels that were launched after it. megatron-core's tensor parallelism needs that order to overlap
# communication with computation; other layouts do not.
ONE_QUEUE, MANY_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@dataclass(frozen=True)
class Workers:
    """A run's workers, connected for refits."""

    policy: RemotePolicy
    generation: RecoveringGeneration
    engines: WorkerGroup
    weights: WeightSync

    def peak_memory(self) -> dict[str, int]:
        """The highest resident memory of each worker, in bytes, by worker name."""
        return _peak_memory(self.policy.group) | _peak_memory(self.engines)


@dataclass(frozen=True)
class Reserved:
    """Worker processes that import their packages while the launcher reads its data."""

    config: Config
    policy: WorkerGroup
    generation: WorkerGroup | None
    imports: tuple[Call, ...]
    setup: Timer

    def setup_seconds(self) -> dict[str, float]:
        """Seconds of each part of the set-up; `total` is the time since the command, including the start of Ray."""
        return self.setup.take() | {"total": seconds_since_command()}


def reserve(config: Config, run_folder: Path, setup: Timer) -> Reserved:
    """Start a process for every policy rank and, where the algorithm generates, for every engine. Ray is running.
    `setup` times the set-up until the first step.

    Raises:
        WorkerError: there are too few GPUs, or a process did not start within `cluster.start_timeout_s`.
    """
    placement = place(config, engines(config) if generates(config) else 0)
    policy = _policy_group(config, placement, run_folder)
    generation = _generation_group(config, placement, run_folder) if generates(config) else None
    imports = [_load_policy(config, policy)]
    if generation is not None:
        imports.append(_load_generation(config, generation))
    return Reserved(config, policy, generation, tuple(imports), setup)


def launch(
    reserved: Reserved,
    model_path: Path,
    probe_prompt: Sequence[int],
    saved: Path | None,
    say: Callable[[str], None],
) -> Workers:
    """Start policy and engines in their processes and connect them. The policy resumes from the folder `saved`, if
    there is one. `say` reports engines that are lost during the run.

    After each refit, every engine continues `probe_prompt` (token ids), and the policy scores the continuation.

    Raises:
        WorkerError: a worker did not start within `cluster.start_timeout_s`.
    """
    config, policy, generation, setup = reserved.config, reserved.policy, reserved.generation, reserved.setup
    if generation is None:
        raise ValueError("no processes were reserved for generation")
    limit = config.cluster.start_timeout_s
    with setup("import"):
        wait(*reserved.imports, timeout_s=limit)
    policy_start = policy_arguments(config, model_path)
    engine_start = {
        "generation": config.generation,
        "policy": config.policy,
        "model_path": str(model_path),
        "seed": config.algorithm.seed,
        "on_gpu": on_gpus(config),
    }
    remote_generation = RemoteGeneration(generation, config.generation.colocated.enabled)
    if on_gpus(config) and config.generation.colocated.enabled:
        # An engine measures the GPU's free memory while it starts, so the policy starts when the engine sleeps.
        with setup("generation_init"):
            wait(generation.start([engine_start] * len(generation)), timeout_s=limit)
            remote_generation.finish_generation()
        with setup("policy_init"):
            wait(policy.start([policy_start] * len(policy)), timeout_s=limit)
    else:
        with setup("policy_and_generation_init"):
            wait(
                policy.start([policy_start] * len(policy)),
                generation.start([engine_start] * len(generation)),
                timeout_s=limit,
            )
    remote_policy = _ready_policy(reserved, model_path, saved)
    with setup("connect"):
        weights = WeightSync(remote_policy, remote_generation, config, ProbeSettings.of(config, probe_prompt))

    def start_engines(group: WorkerGroup) -> None:
        wait(_load_generation(config, group), timeout_s=limit)
        wait(group.start([engine_start] * len(group)), timeout_s=limit)

    restarts, capacity = config.cluster.max_restarts, config.generation.vllm_cfg.max_num_seqs
    policy_waits = not generates_ahead(config)
    recovering = RecoveringGeneration(remote_generation, weights, start_engines, restarts, capacity, policy_waits, say)
    return Workers(remote_policy, recovering, generation, weights)


def launch_policy(reserved: Reserved, model_path: Path, saved: Path | None) -> RemotePolicy:
    """Start the policy alone, for a run that generates nothing. Raises WorkerError as `launch` does."""
    config, policy, limit = reserved.config, reserved.policy, reserved.config.cluster.start_timeout_s
    with reserved.setup("import"):
        wait(*reserved.imports, timeout_s=limit)
    with reserved.setup("policy_init"):
        wait(policy.start([policy_arguments(config, model_path)] * len(policy)), timeout_s=limit)
    return _ready_policy(reserved, model_path, saved)


def _ready_policy(reserved: Reserved, model_path: Path, saved: Path | None) -> RemotePolicy:
    config = reserved.config
    batch, together = sequences_per_optimizer_step(config), sequences_together(config)
    layout = Layout.configured(config.policy, "train", on_gpus(config), together)
    # Rows of a fixed layout are padded to the longest of the whole batch, whoever has them.
    padding = None if layout.mode == "fixed" else layout
    policy = RemotePolicy(reserved.policy, batch, together, _flops(config, model_path), padding)
    if saved is not None:
        with reserved.setup("resume"):
            _load(policy, saved)
    return policy


def _flops(config: Config, model_path: Path) -> SequenceFlops | None:
    shape = described_shape(model_path)
    return None if shape is None else SequenceFlops(shape, config.policy.megatron_cfg.peft)


def _load(policy: RemotePolicy, saved: Path) -> None:
    try:
        policy.load(str(saved))
    except CheckpointError as error:
        advice = f"If {saved.parent} is damaged, start a new run from another checkpoint: checkpoint.resume_from=..."
        raise CheckpointError(f"{error}\n{advice}") from error


def _policy_group(config: Config, placement: Placement, run_folder: Path) -> WorkerGroup:
    if not on_gpus(config):
        environment = CPU_POLICY_ENVIRONMENT | ON_CPUS
    else:
        environment = ONE_QUEUE if parallel_dims(config).tp > 1 else MANY_QUEUES
        environment = environment | _segments(config)
    environment = environment | {"OMP_NUM_THREADS": str(_threads(config, policy_ranks(config)))}
    environment |= activations.environment(config.policy.megatron_cfg)
    log.info("environment of the policy: %s", environment)
    return WorkerGroup(
        "policy", placement.policy, str(run_folder / "logs"), environment, limit_s=config.cluster.phase_timeout_s
    )


def _segments(config: Config) -> dict[str, str]:
    """Set torch's allocator: batches of changing sizes fragment its cache less with expandable segments. Memory of such
    segments can neither be shared with another process nor be put to sleep by vLLM."""
    if not generates(config):
        return dict.fromkeys(_SEGMENTS, "expandable_segments:True")
    return dict.fromkeys(_SEGMENTS, "expandable_segments:False") if config.generation.colocated.enabled else {}


def _generation_group(config: Config, placement: Placement, run_folder: Path) -> WorkerGroup:
    environment = engine_of(config).environment(config.generation, on_gpus(config))
    environment |= _segments(config) if on_gpus(config) else ON_CPUS
    environment |= {"OMP_NUM_THREADS": str(_threads(config, engines(config)))}
    log.info("environment of the generation engines: %s", environment)
    return WorkerGroup(
        "generation",
        placement.generation,
        str(run_folder / "logs"),
        environment,
        engine_ranks(config),
        config.cluster.phase_timeout_s,
    )


def _load_policy(config: Config, policy: WorkerGroup) -> Call:
    host, port = policy.addresses(config.cluster.start_timeout_s)[0]
    places = [
        {
            "RANK": str(rank),
            # Each process sees one GPU.
            "LOCAL_RANK": "0" if on_gpus(config) else str(rank),
            "WORLD_SIZE": str(len(policy)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        for rank in range(len(policy))
    ]
    return policy.load(WORKER_CLASS, places)


def _load_generation(config: Config, generation: WorkerGroup) -> Call:
    visible = [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        for gpus in generation.gpus(config.cluster.start_timeout_s)
    ]
    return generation.load(engine_of(config).worker, visible)


def policy_arguments(config: Config, model_path: Path) -> dict[str, Any]:
    """Keyword arguments of `MegatronWorker`, which are the same on every rank."""
    training, logprobs = micro_batch_sizes(config)
    return {
        "policy": replace(config.policy, train_micro_batch_size=training, logprob_batch_size=logprobs),
        "cluster": config.cluster,
        "model_path": str(model_path),
        "seed": config.algorithm.seed,
        "temperature": config.generation.temperature if generates(config) else 1.0,
        "keep_reference": compares(config),
        "sequences_together": sequences_together(config),
        "threads": _threads(config, policy_ranks(config)),
        "on_gpu": on_gpus(config),
        "residency": Residency.of(config),
        "resume_layouts": config.checkpoint.resume_layouts,
    }


def _threads(config: Config, workers: int) -> int:
    """CPU threads of each of `workers` workers, which share the cores of their machines. A worker with more than two
    cores leaves one to other processes: all its threads wait for one that has to share its core."""
    cores = available_cores() // -(-workers // config.cluster.num_nodes)
    return config.cluster.threads_per_worker or max(1, cores - (cores > 2))


def _peak_memory(group: WorkerGroup) -> dict[str, int]:
    return {f"{group.name}-{rank}": size for rank, size in enumerate(group.peak_memory())}
