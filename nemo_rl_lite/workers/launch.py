"""Waits for a run's starting workers, and connects them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nemo_rl_lite.checkpoint.store import explained
from nemo_rl_lite.cluster.calls import Call, wait
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.engines import engines_leave_room
from nemo_rl_lite.config.sizes import (
    engine_capacity,
    generates_ahead,
    iterations,
    least_engines,
    needs_equal_counts,
    on_gpus,
    prompt_siblings,
    sequences_per_optimizer_step,
    sequences_together,
)
from nemo_rl_lite.errors import CheckpointError, WorkerError
from nemo_rl_lite.generation.mismatch import MismatchBudget
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.models.shape import known_shape
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.planning.parameters import SequenceFlops
from nemo_rl_lite.policy.micro_batches import Layout
from nemo_rl_lite.system.engine_count import requested_engines
from nemo_rl_lite.workers.budget import RestartBudget
from nemo_rl_lite.workers.generation import RemoteGeneration
from nemo_rl_lite.workers.policy import RemotePolicy, RemoteTeacher
from nemo_rl_lite.workers.recovery import EngineRules, RecoveringGeneration
from nemo_rl_lite.workers.reserve import StartingWorkers, load_generation, start_engines, start_policy, start_teacher
from nemo_rl_lite.workers.rollouts import RolloutWorkers
from nemo_rl_lite.workers.weight_sync import ProbeSettings, WeightSync

# After this part of its start, a vLLM engine allocates only within its share of the GPU. Engines without it, such as
# those of several GPUs or without CUDA graphs, end their whole start before.
_LAST_MEMORY = "cuda_graphs"


@dataclass(frozen=True)
class Workers:
    """A run's workers, connected for refits."""

    policy: RemotePolicy
    teacher: RemoteTeacher | None
    generation: RecoveringGeneration
    weights: WeightSync
    rollouts: RolloutWorkers | None
    """Rollout workers, if any."""

    @property
    def groups(self) -> list[WorkerGroup]:
        """Return all workers that live."""
        teacher = [self.teacher.group] if self.teacher else []
        rollouts = [self.rollouts.group] if self.rollouts else []
        return [self.policy.group, *teacher, self.generation.live, *rollouts]


def launch(
    begun: StartingWorkers,
    probe_prompt: Sequence[int],
    saved: Path | None,
    budget: RestartBudget,
    setup: Timer,
    say: Callable[[str], None],
) -> Workers:
    """Wait for policy and engines, and connect them.

    Args:
        probe_prompt: token ids that every engine continues after each refit, to compare with the policy.
        saved: the checkpoint folder that the policy resumes from, if any.
        budget: counts the restarts of engines and rollout workers.
        setup: times the waits.
        say: reports engines that are lost during the run.

    Raises:
        WorkerError: a worker did not start within `cluster.start_timeout_s`.
    """
    config, generation = begun.config, begun.generation
    if generation is None:
        raise ValueError("no processes were reserved for generation")
    limit, shares_device = config.cluster.start_timeout_s, config.generation.colocated.enabled
    starting, imports, engines = dict[int, Callable[[], object]](), [*begun.imports], list[Call]()
    if (least := least_engines(config)) < len(generation):
        # The first refit waits for them.
        starting = {rank: partial(wait, *calls, timeout_s=limit) for rank, calls in begun.engines.items()}
    else:
        imports += [imported for imported, _ in begun.engines.values()]
        engines += [built for _, built in begun.engines.values()]
    with setup("import"):
        wait(*imports, timeout_s=limit)
    started = [rank for rank in range(len(generation)) if rank not in starting]
    remote_generation = RemoteGeneration(generation, shares_device, started)
    if begun.policy is None:
        _build_beside_engines(begun, remote_generation, engines, saved is not None, setup)
    else:
        with setup("policy_and_generation_init"):
            _built(setup, limit, begun.policy, *engines, *_if_any(begun.teacher), *_if_any(begun.rollout_workers))
    remote_policy = _ready_policy(begun, saved, setup)
    with setup("connect"):
        teacher = None if begun.teacher_group is None else RemoteTeacher.of(config, begun.teacher_group)
        weights = WeightSync(remote_policy, remote_generation, config, ProbeSettings.of(config, probe_prompt))

    mismatch = MismatchBudget(config.generation, begun.folder, say)

    def restart_engines(group: WorkerGroup) -> None:
        own = replace(config, generation=mismatch.settings)
        wait(load_generation(own, group), timeout_s=limit)
        wait(start_engines(own, group, begun.model_path), timeout_s=limit)

    if weights.shares_weights:
        # If an engine holds the policy's weights and dies, the policy must restart too.
        budget = replace(budget, most=0)
    policy_waits, rollouts = not generates_ahead(config), list[RolloutWorkers]()

    def make_queue(
        on_loss: Callable[[int, WorkerError], None],
        restore: Callable[[], None],
        on_worker_loss: Callable[[WorkerError], None],
    ) -> RequestQueue | RolloutWorkers:
        if begun.rollouts is None:
            capacity, share = config.generation.vllm_cfg.max_num_seqs, engine_capacity(config)
            dead = list(starting)
            return RequestQueue(remote_generation.replicas, capacity, on_loss, restore, dead, share=share)
        groups, folders = (begun.rollouts, generation), (begun.model_path, begun.folder)
        own = on_loss, restore, on_worker_loss, say, starting
        rollouts.append(RolloutWorkers(*groups, config, *folders, *own))
        return rollouts[0]

    requested = partial(requested_engines, begun.folder) if starting else lambda: None
    rules = EngineRules(least, not shares_device, requested)
    own = remote_generation, weights, restart_engines, mismatch, budget
    recovering = RecoveringGeneration(*own, make_queue, policy_waits, say, rules, starting)
    return Workers(remote_policy, teacher, recovering, weights, next(iter(rollouts), None))


def _build_beside_engines(
    begun: StartingWorkers, generation: RemoteGeneration, engines: Sequence[Call], resumes: bool, setup: Timer
) -> None:
    """Build policy and teacher on the GPUs of engines, which have begun to start. Engines that sleep while the policy
    works complete their start before. Others only take their memory before."""
    config, limit = begun.config, begun.config.cluster.start_timeout_s
    others = [*engines, *_if_any(begun.rollout_workers)]
    stays = engines_leave_room(config)
    with setup("generation_init"):
        if stays:
            wait(generation.group.part(generation.live).start_reaches(_LAST_MEMORY), timeout_s=limit)
        else:
            _built(setup, limit, *others)
            generation.finish_generation()
    with setup("policy_init"):
        policy = start_policy(config, begun.policy_group, begun.model_path, resumes)
        teachers = [start_teacher(config, begun.teacher_group)] if begun.teacher_group else []
        _built(setup, limit, policy, *teachers, *(others if stays else []))


def _if_any(call: Call | None) -> list[Call]:
    return [] if call is None else [call]


def launch_policy(begun: StartingWorkers, saved: Path | None, setup: Timer) -> RemotePolicy:
    """Wait for the policy of a run without generation, and for its teacher. Raises WorkerError as `launch` does."""
    limit = begun.config.cluster.start_timeout_s
    if begun.policy is None:
        raise ValueError("the policy waits for engines, and there are none")
    with setup("import"):
        wait(*begun.imports, timeout_s=limit)
    with setup("policy_init"):
        _built(setup, limit, begun.policy, *_if_any(begun.teacher))
    return _ready_policy(begun, saved, setup)


def _built(setup: Timer, limit_s: float, *calls: Call) -> None:
    """Wait until the workers are built; record the time of each part of the start-up, `<group>/<part>`, in the group's
    slowest process."""
    workers = [worker for call in calls for worker in call.workers]
    slowest: dict[str, float] = {}
    for worker, parts in zip(workers, wait(*calls, timeout_s=limit_s), strict=True):
        for part, seconds in parts.items():
            name = f"{worker.partition(' ')[0]}/{part}"
            slowest[name] = max(seconds, slowest.get(name, 0.0))
    for name, seconds in slowest.items():
        setup.add(name, seconds)


def _ready_policy(begun: StartingWorkers, saved: Path | None, setup: Timer) -> RemotePolicy:
    config = begun.config
    batch, together = sequences_per_optimizer_step(config), sequences_together(config)
    layout = Layout.configured(config.policy, "train", on_gpus(config), together)
    shape = known_shape(begun.model_path)
    flops = None if shape is None else SequenceFlops(shape, config.policy.megatron_cfg.peft)
    with setup("connect"):
        siblings = prompt_siblings(config)
        policy = RemotePolicy(
            begun.policy_group,
            batch,
            together,
            flops,
            layout,
            iterations(config),
            siblings,
            needs_equal_counts(config),
        )
    if saved is not None:
        try:
            with setup("resume"):
                policy.load(str(saved))
        except CheckpointError as error:
            raise explained(error, saved.parent) from error.__cause__
    return policy


def peak_memory(groups: Sequence[WorkerGroup]) -> dict[str, int]:
    """Return each worker's peak resident memory in bytes, by name."""
    return {
        f"{group.name}-{rank}": size
        for group in groups
        for rank, size in zip(group.ranks, group.peak_memory(), strict=True)
    }
