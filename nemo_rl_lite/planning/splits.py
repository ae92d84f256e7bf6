"""Compares splits of a run's GPUs between engines and policy by step time, and finds the fastest.

There are four kinds of splits:

- Engines and policy share all GPUs and take turns.
- They take turns, and engines also generate for later steps (partial rollouts).
- They share all GPUs, and engines generate while the policy trains.
- Engines have k GPUs and the policy has n (`k + n`). Engines generate one step ahead, or several if they are slow.

Phases of a step are predicted (`planning/time.py`). For a run that has measured them (`planning/advice.py`), the
prediction of each phase is scaled by measured over predicted time of the present split. So only ratios between splits
are predicted.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property

from nemo_rl_lite.config.composition import overlaid
from nemo_rl_lite.config.keys import flatten, parse_override
from nemo_rl_lite.config.names import in_our_names
from nemo_rl_lite.config.overrides import given_keys
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.config.sizes import (
    all_gpus,
    generation_gpus,
    keeps_partial_rollouts,
    parallel_dims,
    policy_ranks,
    sequences_per_optimizer_step,
)
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.planning.automatic import USED, resolve_auto
from nemo_rl_lite.planning.budget import budget
from nemo_rl_lite.planning.lengths import Lengths, slowest_replica
from nemo_rl_lite.planning.time import StepTime, predict_step
from nemo_rl_lite.validation.algorithm import corrects_staleness
from nemo_rl_lite.validation.compose import resolve

# Share of the step time that a change must save, and that stale rollouts must save in addition.
CLOSE, STALE = 0.05, 0.1
# Share of the step that an idle time needs to be shown, and share of training that replicas need for a sentence.
FEWEST_IDLE, MUCH_IDLE = 0.01, 0.1
# Number of refused splits that a sentence names.
MOST_NAMES = 8
HEADERS = ["GPUs", "rollouts", "generation", "logprob", "train", "refit", "step", "idle"]
_COLOCATED, _SOURCE, _LOSS = "generation.colocated", "algorithm.rollouts.source", "algorithm.loss_fn"
_PARTIAL, _IN_FLIGHT = "partial", "algorithm.rollouts.in_flight_weight_updates"
# Sources of engines with their own GPUs.
_AHEAD = "one_step_off", "queue"
# What follows the name of shared GPUs.
_SAID = {"on_policy": "", _PARTIAL: ", partial", "one_step_off": ", async", "queue": ", async"}
_RESOURCES = [f"{_COLOCATED}.resources.{name}" for name in ("num_nodes", "gpus_per_node")]
_AWAY, _SHARE = "policy.offload_for_generation", "generation.vllm_cfg.gpu_memory_utilization"
_CORRECTED = [f"{_LOSS}.use_importance_sampling_correction=true", f"{_LOSS}.truncated_importance_sampling_ratio=2"]
_TOO_SMALL = f"it needs more than {USED:.0%} of a GPU's memory"


@dataclass(frozen=True)
class GpuSplit:
    """A split of a run's GPUs. Colocated GPUs count for both sides."""

    engine_gpus: int
    policy_gpus: int
    colocated: bool
    source: str = "one_step_off"
    """Value of `algorithm.rollouts.source`, or `partial`: a queue with sleeping engines."""
    time: StepTime | None = None
    """None if the split is invalid or does not fit."""
    slowest: float = 1.0
    """Training time of the slowest data-parallel replica, as a multiple of the mean."""
    refusal: str = ""
    overrides: Sequence[str] = ()
    """Overrides to add to the command."""
    instead_of: Sequence[str] = ()
    """Overrides to remove from the command."""

    @property
    def is_async(self) -> bool:
        """True if rollouts begin before the step that trains on them."""
        return self.source != "on_policy"

    @property
    def overlaps(self) -> bool:
        """True if engines generate while the policy trains."""
        return self.source not in ("on_policy", _PARTIAL)

    @property
    def kind(self) -> tuple[int, bool, bool, bool]:
        """A run is compared with splits of other kinds."""
        return self.engine_gpus, self.colocated, self.is_async, self.overlaps

    @property
    def name(self) -> str:
        """Return `8 shared` or `2 + 6`: engines, then policy."""
        return f"{self.policy_gpus} shared" if self.colocated else f"{self.engine_gpus} + {self.policy_gpus}"

    @property
    def seconds(self) -> float:
        """Step time in seconds; infinite if refused."""
        if self.time is None:
            return float("inf")
        if not self.overlaps:
            return self.time.synchronous
        return self.time.contended if self.colocated else self.time.overlapped

    @property
    def idle(self) -> dict[str, float]:
        """Share of the step in which the GPUs of a side wait for the other side, by side. `replicas`: share in which
        the mean replica waits for the slowest one."""
        if self.time is None:
            return {}
        waits = {"replicas": self.time.policy * (1 - 1 / self.slowest)}
        if not self.colocated:
            late = self.time.policy - self.time.generation
            waits["engines"] = max(0.0, late) if self.overlaps else self.time.policy
            waits["policy"] = max(0.0, -late) if self.overlaps else self.time.generation
        return {who: seconds / self.seconds for who, seconds in waits.items() if seconds >= FEWEST_IDLE * self.seconds}


@dataclass(frozen=True)
class GpuSplits:
    """Splits of the GPUs of `config`, whose `auto` is unresolved."""

    config: Config
    shape: ModelShape
    gpu_bytes: int
    lengths: Lengths
    overrides: Sequence[str] = ()
    """The command's overrides, some of which a split may replace."""
    measured: StepTime | None = None
    """Measured time of the phases of the present split."""
    host_bytes: int | None = None
    """Host memory of a machine; see `resolve_auto`."""

    @cached_property
    def present(self) -> GpuSplit:
        """The configured split."""
        return self._with_time(self.config, self.measured or self.predicted(self.config))

    @cached_property
    def others(self) -> Sequence[GpuSplit]:
        """The other splits: colocated, with partial rollouts, or async, and each number of engine GPUs, or engine
        machines if there are several."""
        total, nodes = all_gpus(self.config), self.config.cluster.num_nodes
        by_node, by_gpu = _RESOURCES
        key, other, count = (by_node, by_gpu, nodes) if nodes > 1 else (by_gpu, by_node, total)
        shared = "on_policy", _PARTIAL, "one_step_off"
        tried = [self._tried(GpuSplit(total, total, True, source), []) for source in shared]
        for number in range(1, count):
            engine_gpus, own = number * total // count, [f"{key}={number}", f"{other}=null"]
            split = GpuSplit(engine_gpus, total - engine_gpus, colocated=False)
            tried.append(min((self._tried(replace(split, source=one), own) for one in _AHEAD), key=_handicapped))
        return [split for split in tried if split.kind != self.present.kind]

    @property
    def best(self) -> GpuSplit:
        """The fastest split. Any change must save `CLOSE` of the step, and `STALE` more if it makes rollouts stale."""

        def handicapped(one: GpuSplit) -> float:
            if one is self.present:
                return one.seconds
            return one.seconds * (1 + CLOSE + STALE * (one.is_async and not self.present.is_async))

        return min([self.present, *self.others], key=handicapped)

    def predicted(self, config: Config) -> StepTime:
        """Predict the phases of a split."""
        return predict_step(self._resolved(config), self.shape, self.gpu_bytes, self.lengths)

    def _resolved(self, config: Config) -> Config:
        return resolve_auto(config, self.shape, self.gpu_bytes, self.host_bytes).config

    def _tried(self, split: GpuSplit, own: Sequence[str]) -> GpuSplit:
        """Return a split with its time and overrides, or with the reason why it is refused. `own`: overrides of its
        GPUs."""
        wanted = [f"{_COLOCATED}.enabled={str(split.colocated).lower()}", *own, *self._rollouts(split)]
        # Only engines that sleep make room for the policy, and only a policy that shares their GPUs for engines.
        wanted.append(f"{_AWAY}={'[]' if split.overlaps else 'auto'}")
        if split.colocated != self.present.colocated:
            wanted.append(f"{_SHARE}=auto")
        changes, values = [], dict(flatten(asdict(self.config)))
        for text, one in zip(wanted, map(parse_override, wanted), strict=True):
            if one is not None and values.get(one.key_or_group, text) != one.value():
                changes.append(text)
        # Colocated engines have no separate GPUs.
        replaced = {*given_keys(changes), *(_RESOURCES if split.colocated else [])}
        gone = [one for one in self.overrides if replaced & {*given_keys([one])}]
        # A short name such as `async` also sets keys that stay.
        kept = [one for one in in_our_names(gone)[0] if not replaced & {*given_keys([one])}]
        try:
            config = resolve(overlaid(self.config, changes))
        except ConfigError as error:
            return replace(split, refusal=f"{error.violations[0].key} {error.violations[0].rule}")
        planned = budget(self._resolved(config), self.shape, self.gpu_bytes)
        if planned.engine_room < 0 or planned.device[planned.peak_phase] > USED * self.gpu_bytes:
            return replace(split, refusal=_TOO_SMALL)
        found = self._with_time(config, self._scaled(self.predicted(config)))
        return replace(found, overrides=[*changes, *kept], instead_of=gone)

    def _rollouts(self, split: GpuSplit) -> list[str]:
        """Return the overrides for the rollouts and the sleep mode of a split."""
        options, asleep = self.config.options(GRPOConfig), f"{_COLOCATED}.sleep="
        if not split.is_async:
            return [f"{_SOURCE}=on_policy", f"{asleep}auto"]
        corrects = options.loss is not None or corrects_staleness(options.loss_fn)
        corrected = [] if corrects else _CORRECTED
        if split.source == _PARTIAL:
            return [f"{_SOURCE}=queue", f"{_IN_FLIGHT}=true", f"{asleep}true", *corrected]
        if self.present.overlaps:
            # `auto` may let engines of a queue sleep.
            return [f"{asleep}{'false' if split.colocated and self.present.source == 'queue' else 'auto'}"]
        return [f"{_SOURCE}={split.source}", f"{asleep}auto", *corrected]

    def _scaled(self, time: StepTime) -> StepTime:
        """Scale predicted phases by what the present split measured. Work between the phases does not scale, so the
        refit only changes by the predicted difference."""
        own = self.measured
        if own is None:
            return time
        now = self.predicted(self.config)
        phases = zip(astuple(time), astuple(own), astuple(now), strict=True)
        scaled = StepTime(*(there * seconds / before if before else seconds for there, seconds, before in phases))
        return replace(scaled, refit=max(0.0, own.refit + time.refit - now.refit))

    def _with_time(self, config: Config, time: StepTime) -> GpuSplit:
        gpus, colocated = generation_gpus(config), config.generation.colocated.enabled
        source = config.options(GRPOConfig).rollouts.source
        if source == "queue" and keeps_partial_rollouts(self._resolved(config)):
            source = _PARTIAL
        slowest = slowest_replica(
            self.shape, self.lengths, sequences_per_optimizer_step(config), parallel_dims(config).dp
        )
        return GpuSplit(gpus, policy_ranks(config), colocated, source, time, slowest)


def _handicapped(split: GpuSplit) -> float:
    """Return the step time with what more than one stale step must save."""
    return split.seconds * (1 + STALE * (split.source == "queue"))


def rows(splits: GpuSplits) -> list[list[str]]:
    """Return a row of times for each split that is not refused. Marks the present one and a better one."""
    table = []
    for one in sorted([splits.present, *splits.others], key=lambda one: (not one.colocated, one.engine_gpus)):
        if one.time is not None:
            mark = " (now)" if one is splits.present else " (best)" if one is splits.best else ""
            idle = "\n".join(f"{side} {share:.0%}" for side, share in one.idle.items())
            phases = (one.time.generation, one.time.logprob, one.time.train, one.time.refit)
            times = map(shown_seconds, (*phases, one.seconds))
            table.append([f"{one.name}{mark}", one.source.replace("_", " "), *times, idle or "-"])
    return table


def lines(splits: GpuSplits) -> Iterator[str]:
    """Yield sentences about idle replicas and refused splits, and the overrides of the best one."""
    idle = 1 - 1 / splits.present.slowest
    if idle >= MUCH_IDLE:
        sequences, replicas = sequences_per_optimizer_step(splits.config), parallel_dims(splits.config).dp
        yield (
            f"replicas wait for {idle:.0%} of training for the longest sequence: each of {replicas} has "
            f"{sequences // replicas} of {sequences}; "
            "try a larger policy.train_global_batch_size or larger parallel sizes"
        )
    refused = [one for one in splits.others if one.time is None]
    for key in dict.fromkeys(one.refusal.split()[0] for one in refused):
        alike = [one for one in refused if one.refusal.startswith(f"{key} ")]
        names = [f"{one.name}{_SAID[one.source] if one.colocated else ''}" for one in alike]
        more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
        yield f"refused: {', '.join([*names[:MOST_NAMES], *more])}: {alike[0].refusal}"
    best = splits.best
    if best is splits.present:
        stale = "" if best.is_async else f", or by {CLOSE + STALE:.0%} with stale rollouts"
        yield f"no other split shortens the step by {CLOSE:.0%}{stale}"
    else:
        yield f"shortest step: {shown_seconds(best.seconds)} s with {described(best)}; overrides:"
        yield shlex.join(best.overrides)
        if best.instead_of:
            yield f"instead of: {shlex.join(best.instead_of)}"


def described(split: GpuSplit) -> str:
    """Name the GPUs, and say when engines generate for later steps."""
    gpus = f"{split.name} GPU{'s' * (split.policy_gpus > 1)}"
    gpus += "" if split.colocated else " for engines and policy"
    if split.source == _PARTIAL:
        return f"{gpus} and partial rollouts"
    return f"{gpus}, where engines generate while the policy trains" if split.is_async else gpus


def shown_seconds(seconds: float) -> str:
    """Return `0.43`, `4.3` or `43`."""
    return f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
