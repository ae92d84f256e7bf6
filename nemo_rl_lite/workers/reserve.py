"""Starts the processes of a run's workers, which import and build while the launcher reads its data.

This module does not import torch, so that workers start before the launcher's imports.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_rl_lite.cluster.calls import Call, has_died, wait
from nemo_rl_lite.cluster.runtime import Placement, Slot, available_cores, place
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.algorithms import compares, generates, has_teacher
from nemo_rl_lite.config.engines import EngineHost, engine_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.config.sizes import (
    as_teacher,
    engine_hosts,
    engine_ranks,
    engines,
    least_engines,
    micro_batch_sizes,
    on_gpus,
    parallel_dims,
    policy_ranks,
    rollout_workers,
    sequences_together,
    teacher_topk,
)
from nemo_rl_lite.config.sources import teacher_configs
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.offload.residency import Residency
from nemo_rl_lite.system.machine import ON_CPUS

log = logging.getLogger(__name__)
POLICY_CLASS = "nemo_rl_lite.policy.worker.MegatronWorker"
TEACHER_CLASS = "nemo_rl_lite.policy.teacher.TeacherWorker"
ROLLOUT_CLASS = "nemo_rl_lite.workers.rollout_worker.RolloutWorker"
ENGINE_LOOP = "nemo_rl_lite.generation.loop.EngineLoop"
# Seconds in which an engine ends its step and answers.
ENGINE_ANSWER_S = 60.0
# Seconds in which a policy rank on CPUs or GPUs closes its worker after the loss of another. On GPUs, NCCL's
# communicators must end first.
CLOSE_S, CLOSE_GPU_S = 10.0, 30.0
# Leaves errors and timeouts of NCCL to `policy.groups.beat`: torch's watchdog records them, without a wait.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


@dataclass(frozen=True)
class AllocatedWorkers:
    """Worker processes that are importing their packages."""

    config: Config
    policy_group: WorkerGroup
    teacher_group: WorkerGroup | None
    generation: WorkerGroup | None
    rollouts: WorkerGroup | None
    """Rollout workers, if any."""
    imports: tuple[Call, ...]
    """Imports of all workers except engines."""
    engine_imports: Mapping[int, Call]
    """Imports of engines by rank."""


@dataclass(frozen=True)
class StartingWorkers(AllocatedWorkers):
    """Worker processes that are building. `policy` and `teacher` are None if they wait for the memory of
    colocated engines.

    Each call returns start-up times by part.
    """

    model_path: Path
    folder: Path
    engines: Mapping[int, tuple[Call, Call]]
    """Import and start by rank. An engine that was built before has none."""
    rollout_workers: Call | None
    policy: Call | None
    teacher: Call | None


def reserve(config: Config, run_folder: Path, avoided: Sequence[str] = ()) -> AllocatedWorkers:
    """Start a process for every policy rank, teacher rank and engine. Ray must be running. `avoided`: see `place`.

    Raises:
        WorkerError: there are too few GPUs, or a process did not start within `cluster.start_timeout_s`.
    """
    placement = place(config, engines(config) if generates(config) else 0, has_teacher(config), avoided)
    policy = policy_group(config, placement.policy, run_folder)
    teacher = None
    if has_teacher(config):
        teacher = policy_group(as_teacher(config), placement.teacher, run_folder, "teacher")
    generation = generation_group(config, placement, run_folder) if generates(config) else None
    rollouts = None if generation is None else _rollout_group(config, placement, run_folder)
    imports = _load_others(config, policy, teacher, rollouts)
    engine_imports = {} if generation is None else load_generation(config, generation).by_rank(generation.ranks)
    return AllocatedWorkers(config, policy, teacher, generation, rollouts, imports, engine_imports)


def begin(reserved: AllocatedWorkers, model_path: Path, run_folder: Path, resumes: bool = False) -> StartingWorkers:
    """Build the workers once they have imported, except a policy that waits for colocated engines. `resumes`: the
    policy will load a checkpoint."""
    return _begin_others(_begin_engines(reserved, model_path), reserved, model_path, run_folder, resumes)


def _begin_engines(reserved: AllocatedWorkers, model_path: Path) -> dict[int, tuple[Call, Call]]:
    """Build the engines that are importing."""
    imports = reserved.engine_imports
    if reserved.generation is None or not imports:
        return {}
    built = start_engines(reserved.config, reserved.generation.part([*imports]), model_path)
    return {rank: (imports[rank], call) for rank, call in built.by_rank([*imports]).items()}


def begin_again(begun: StartingWorkers, resumes: bool) -> StartingWorkers:
    """Start policy, teacher and rollout workers again, and keep the engines, whose requests are aborted.

    Engines that do not answer start again too. Policy ranks keep their processes if possible (`_closed`).

    Raises:
        WorkerError: fewer than `least_engines` answer, or a process does not start.
    """
    config, policy, teacher, rollouts = begun.config, begun.policy_group, begun.teacher_group, begun.rollouts
    if begun.generation is None:
        raise ValueError("there are no engines")
    closing = policy.close() if _can_close(config) else None
    lost = _not_answering(config, begun.generation)
    died = [] if closing is None else _replace_dead(policy, closing)
    closed = [] if closing is None else _closed(policy, closing, CLOSE_GPU_S if on_gpus(config) else CLOSE_S)
    policy.replace([rank for rank in policy.ranks if rank not in (*died, *closed)])
    for group in (teacher, rollouts):
        if group is not None:
            group.replace(range(len(group)))
    engine_imports = load_generation(config, begun.generation.replace(lost)).by_rank(lost) if lost else {}
    imports = _load_others(config, policy, teacher, rollouts)
    reserved = AllocatedWorkers(config, policy, teacher, begun.generation, rollouts, imports, engine_imports)
    engines_begun = _begin_engines(reserved, begun.model_path)
    return _begin_others(engines_begun, reserved, begun.model_path, begun.folder, resumes)


def _not_answering(config: Config, generation: WorkerGroup) -> list[int]:
    """Abort the requests of all engines; return those that do not answer. Raises WorkerError if too few do."""
    # The work of the failed attempt is not counted.
    calls = [generation.call(method) for method in ("clear", "resume", "take_decoded")]
    errors = _errors(generation, calls, ENGINE_ANSWER_S)
    if len(generation) - len(errors) < least_engines(config):
        raise next(iter(errors.values()))
    return list(errors)


def _can_close(config: Config) -> bool:
    """Return whether policy ranks can leave a lost one. DeepEP's kernels wait for it, and NCCL's abort does not end
    them."""
    return not on_gpus(config) or config.policy.megatron_cfg.moe_token_dispatcher_type != "flex"


def _replace_dead(policy: WorkerGroup, closing: Call) -> list[int]:
    """Replace workers that are known to have died, and return their ranks. They import while the others close."""
    died = [rank for rank, call in closing.by_rank(policy.ranks).items() if has_died(call)]
    policy.replace(died).load(POLICY_CLASS, [{}] * len(died))
    return died


def _closed(policy: WorkerGroup, closing: Call, limit_s: float) -> list[int]:
    """Wait for workers that close; return the ranks whose processes can build another one. Others are still waiting for
    the lost rank, or their GPU has failed."""
    errors = _errors(policy, [closing], limit_s)
    for error in errors.values():
        log.log(logging.DEBUG if error.lost else logging.WARNING, "%s; it gets a new process", error)
    kept = [rank for rank in policy.ranks if rank not in errors]
    log.info("policy ranks that keep their processes: %s", kept)
    return kept


def _errors(group: WorkerGroup, calls: Sequence[Call], limit_s: float) -> dict[int, WorkerError]:
    """Wait for calls of all workers, each with the same limit; return the errors by rank."""
    by_rank, deadline = [call.by_rank(group.ranks) for call in calls], time.monotonic() + limit_s
    errors = dict[int, WorkerError]()
    for rank in group.ranks:
        try:
            wait(*(own[rank] for own in by_rank), timeout_s=max(deadline - time.monotonic(), 0.0))
        except WorkerError as error:
            errors[rank] = error
    return errors


def _load_others(
    config: Config, policy: WorkerGroup, teacher: WorkerGroup | None, rollouts: WorkerGroup | None
) -> tuple[Call, ...]:
    """Import the classes of all workers except engines."""
    imports = [load_rollout_workers(rollouts)] if rollouts is not None else []
    if teacher is not None:
        imports.append(_load_policy(config, teacher, TEACHER_CLASS))
    # The last, because a replaced first rank gives its address after its import.
    return (*imports, _load_policy(config, policy, POLICY_CLASS))


def _begin_others(
    engines_begun: Mapping[int, tuple[Call, Call]],
    reserved: AllocatedWorkers,
    model_path: Path,
    run_folder: Path,
    resumes: bool,
) -> StartingWorkers:
    config, generation = reserved.config, reserved.generation
    # An engine measures free GPU memory at start, so a colocated policy starts when the engine has taken its part.
    waits = generation is not None and on_gpus(config) and config.generation.colocated.enabled
    policy_built = None if waits else start_policy(config, reserved.policy_group, model_path, resumes)
    teacher, rollouts = reserved.teacher_group, reserved.rollouts
    playing = None
    if rollouts is not None:
        playing = start_rollout_workers(config, rollouts, model_path, run_folder, range(len(rollouts)))
    teacher_built = None if teacher is None or waits else start_teacher(config, teacher)
    groups, folders = (reserved.policy_group, teacher, generation, rollouts), (model_path, run_folder)
    built = engines_begun, playing, policy_built, teacher_built
    return StartingWorkers(config, *groups, reserved.imports, reserved.engine_imports, *folders, *built)


def start_policy(config: Config, policy: WorkerGroup, model_path: Path, resumes: bool) -> Call:
    """Build the policy's ranks. `resumes`: they will load a checkpoint."""
    return policy.start([policy_arguments(config, model_path) | {"resumes": resumes}] * len(policy))


def start_teacher(config: Config, teacher: WorkerGroup) -> Call:
    """Build the ranks of the teachers. Each `teacher.model_name` must be a folder."""
    return teacher.start([teacher_arguments(config)] * len(teacher))


def start_engines(config: Config, generation: WorkerGroup, model_path: Path) -> Call:
    """Build the engines, each on all its hosts."""
    arguments = {
        "generation": config.generation,
        "policy": config.policy,
        "model_path": str(model_path),
        "seed": config.algorithm.seed,
        "on_gpu": on_gpus(config),
    }
    hosts = engine_hosts(config)
    if engine_ranks(config) == 1:
        return generation.start([arguments] * len(generation))
    addresses = generation.addresses(config.cluster.start_timeout_s)
    of_engines = [tuple(addresses[start : start + hosts]) for start in range(0, len(addresses), hosts)]
    return generation.start(
        [arguments | {"host": EngineHost(index, own)} for own in of_engines for index in range(hosts)]
    )


def load_rollout_workers(rollouts: WorkerGroup) -> Call:
    return rollouts.load(ROLLOUT_CLASS, [{}] * len(rollouts))


def start_rollout_workers(
    config: Config, rollouts: WorkerGroup, model_path: Path, run_folder: Path, ranks: Sequence[int]
) -> Call:
    """Build rollout workers of these ranks."""
    arguments = {
        "config": config,
        "model_path": str(model_path),
        "folder": str(run_folder),
        "current_folder": str(Path.cwd()),
    }
    return rollouts.start([arguments | {"rank": rank, "name": f"{rollouts.name} rank {rank}"} for rank in ranks])


def _rollout_group(config: Config, placement: Placement, run_folder: Path) -> WorkerGroup | None:
    """Start an empty process for every rollout worker, on the node of its first engine."""
    count, whole = rollout_workers(config), engines(config)
    first = [-(-worker * whole // count) * engine_ranks(config) for worker in range(count)]
    slots = [placement.generation[slot] | ({"num_gpus": 0} if on_gpus(config) else {}) for slot in first]
    if not slots:
        return None
    environment = {"OMP_NUM_THREADS": "1"}
    limit_s = config.cluster.phase_timeout_s
    return WorkerGroup("rollouts", slots, str(run_folder / "logs"), environment, limit_s=limit_s, is_listened=True)


def policy_group(config: Config, slots: Sequence[Slot], run_folder: Path, name: str = "policy") -> WorkerGroup:
    """Start an empty process for every rank of the policy or the teacher."""
    environment = policy_environment(config)
    log.info("environment of the %s: %s", name, environment)
    return WorkerGroup(name, slots, str(run_folder / "logs"), environment, limit_s=config.cluster.phase_timeout_s)


def generation_group(config: Config, placement: Placement, run_folder: Path) -> WorkerGroup:
    """Start an empty process for every engine."""
    environment = engine_of(config).environment(config.generation, on_gpus(config))
    environment |= _segments(config) if on_gpus(config) else ON_CPUS
    environment |= {"OMP_NUM_THREADS": str(worker_threads(config, engines(config)))}
    log.info("environment of the generation engines: %s", environment)
    return WorkerGroup(
        "generation",
        placement.generation,
        str(run_folder / "logs"),
        environment,
        engine_ranks(config),
        engine_hosts(config),
        config.cluster.phase_timeout_s,
        is_listened=True,
    )


def _load_policy(config: Config, policy: WorkerGroup, class_path: str) -> Call:
    ((host, port),) = policy.part([0]).addresses(config.cluster.start_timeout_s)
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
    return policy.load(class_path, places)


def load_generation(config: Config, generation: WorkerGroup) -> Call:
    visible = [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        for gpus in generation.gpus(config.cluster.start_timeout_s)
    ]
    own = engine_of(config)
    return generation.load(own.worker, visible, own.follower or "", ENGINE_LOOP)


def policy_arguments(config: Config, model_path: Path) -> dict[str, Any]:
    """Return the keyword arguments of `MegatronWorker`, equal on every rank."""
    training, logprobs = micro_batch_sizes(config)
    return {
        "policy": replace(config.policy, train_micro_batch_size=training, logprob_batch_size=logprobs),
        "cluster": config.cluster,
        "model_path": str(model_path),
        "seed": config.algorithm.seed,
        "temperature": config.generation.temperature if isinstance(config.algorithm, GRPOConfig) else 1.0,
        "keep_reference": compares(config),
        "sequences_together": sequences_together(config),
        "threads": worker_threads(config, policy_ranks(config)),
        "on_gpu": on_gpus(config),
        "residency": Residency.of(config),
    }


def teacher_arguments(config: Config) -> dict[str, Any]:
    """Return the keyword arguments of `TeacherWorker`, equal on every rank."""
    teachers = [as_teacher(one) for one in teacher_configs(config).values()]
    return {
        "policies": [replace(own.policy, logprob_batch_size=micro_batch_sizes(own)[1]) for own in teachers],
        "cluster": config.cluster,
        "seed": config.algorithm.seed,
        "temperature": config.generation.temperature,
        "topk": teacher_topk(config),
        "threads": worker_threads(config, policy_ranks(config)),
        "on_gpu": on_gpus(config),
        "residency": Residency.of(config),
    }


def policy_environment(config: Config) -> dict[str, str]:
    """Return the environment of a megatron-core process for the policy's layout in `config`."""
    dims = parallel_dims(config)
    if not on_gpus(config):
        # Compiling megatron-core's fused functions delays the first batch on a CPU by seconds, without a gain.
        environment = {"TORCH_COMPILE_DISABLE": "1"} | ON_CPUS
    else:
        # Hardware work queues. With one, a waiting copy delays later kernels; megatron-core's tensor and context
        # parallelism need this order to overlap communication with computation.
        queues = 1 if dims.tp * dims.cp > 1 else 32
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)} | _segments(config) | NCCL_ENVIRONMENT
    environment |= {"OMP_NUM_THREADS": str(worker_threads(config, policy_ranks(config)))}
    if config.policy.megatron_cfg.fine_grained_activation_offloading:
        # Imported late, because it imports torch.
        from nemo_rl_lite.policy import activation_offload

        environment |= activation_offload.environment(config.policy.megatron_cfg)
    return environment


def worker_threads(config: Config, workers: int) -> int:
    """Return the CPU threads per worker.

    On GPUs one is enough; the CPU optimizer takes more by itself. On CPUs, workers share the cores of their machines.
    With more than two, one core is left to other processes, because all threads wait for a thread that shares its core.
    """
    if on_gpus(config):
        return config.cluster.threads_per_worker or 1
    cores = available_cores() // -(-workers // config.cluster.num_nodes)
    return config.cluster.threads_per_worker or max(1, cores - (cores > 2))


def _segments(config: Config) -> dict[str, str]:
    """Return the setting of torch's allocator. Expandable segments fragment less with changing batch sizes, but
    cannot be shared with another process or put to sleep by vLLM."""
    if generates(config) and not config.generation.colocated.enabled:
        return {}
    return dict.fromkeys(
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), f"expandable_segments:{not generates(config)}"
    )
