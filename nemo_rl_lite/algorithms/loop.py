"""Shared parts of the training loops: the report of a step; validation, checkpoints and stops between steps."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction

from nemo_rl_lite.checkpoint.store import Checkpoints
from nemo_rl_lite.config.schema_algorithm import AlgorithmConfig
from nemo_rl_lite.errors import RunStopped, TrainingError
from nemo_rl_lite.observability.callbacks import Callbacks
from nemo_rl_lite.observability.console import ENGINES_IDLE, RunConsole
from nemo_rl_lite.observability.liveness import note_progress
from nemo_rl_lite.observability.memory import with_rest
from nemo_rl_lite.observability.timer import PolicySpeed, Timer
from nemo_rl_lite.observability.trackers import MetricsLog, under
from nemo_rl_lite.offload.mover import move_metrics
from nemo_rl_lite.policy.interface import Policy, Work
from nemo_rl_lite.system.stopping import Stopping

log = logging.getLogger(__name__)

# Validates after a step and returns metrics, by the names of `algorithm.val_metric`.
Validate = Callable[[int], Mapping[str, float]]


def total_steps(config: AlgorithmConfig, steps_per_epoch: Fraction | int | None) -> int:
    """Return the number of steps after which a run ends, by epochs or `max_num_steps`, whichever comes first."""
    return min(_limits(config, steps_per_epoch).values())


def shown_limits(config: AlgorithmConfig, steps_per_epoch: Fraction | int | None) -> str:
    """Return a sentence on the limit that ends the run; empty if there is only one."""
    limits = _limits(config, steps_per_epoch)
    if len(set(limits.values())) < 2:
        return ""
    first, other = sorted(limits, key=limits.__getitem__)
    return f"the run ends after {limits[first]} steps, by {first}; {other} would be {limits[other]} steps"


def _limits(config: AlgorithmConfig, steps_per_epoch: Fraction | int | None) -> dict[str, int]:
    """Map each configured limit to its steps. Data without an end has no epochs."""
    limits, epochs = {}, config.max_num_epochs
    if config.max_num_steps is not None:
        limits[f"algorithm.max_num_steps = {config.max_num_steps}"] = config.max_num_steps
    if epochs and steps_per_epoch:
        limits[f"algorithm.max_num_epochs = {epochs}"] = max(1, int(epochs * steps_per_epoch))
    return limits


@dataclass(frozen=True)
class Report:
    """Logs a step to the metrics log and the terminal, with metrics of the policy and the machines."""

    metrics: MetricsLog
    console: RunConsole
    policy: Policy
    devices: int
    """GPUs of the run, or policy ranks on CPUs, for throughput per device."""
    speed: PolicySpeed
    system: Callable[[], dict[str, float]]
    """Metrics of the machines since the last call."""

    def step(
        self,
        step: int,
        total: int,
        samples: int,
        train: Mapping[str, float],
        seconds: Mapping[str, float],
        work: Work | None,
        shown: Mapping[str, float],
        others: Mapping[str, float] | None = None,
        memory: Mapping[str, float] | None = None,
    ) -> None:
        """Log a step on `samples` sequences; print a line with `shown` and the trend of its first value. `others`:
        metrics with full names; `memory`: memory metrics of the engines."""
        tokens, whole = train["total_num_tokens"], seconds["total_step_time"]
        speed = {
            "samples_per_sec": samples / whole,
            "tokens_per_sec": tokens / whole,
            "policy_training_tokens_per_sec": tokens / seconds["policy_training"],
            "tokens_per_sec_per_gpu": tokens / whole / self.devices,
        }
        if work is not None:
            speed |= self.speed.training(work.training, seconds["policy_training"])
        if work is not None and work.scoring:
            speed |= self.speed.logprobs(work.scoring, seconds["policy_and_reference_logprobs"])
        self.metrics.log(
            step,
            under("train", train)
            | under("timing/train", seconds)
            | under("timing/replicas", self.policy.take_waits())
            | under("performance", speed)
            | dict(others or {})
            | under("offload", move_metrics(self.policy.pop_moves()))
            | under("memory", with_rest("generate", {**(memory or {}), **self.policy.pop_memory()}))
            | under("ray", self.system()),
        )
        trend = self.metrics.series(f"train/{next(iter(shown))}")[1]
        self.console.step(step, total, shown, seconds, trend, (others or {}).get(ENGINES_IDLE))

    def validation(self, step: int, values: Mapping[str, float], timer: Timer, said: str) -> None:
        """Log a validation after a step, and print `said`."""
        self.metrics.log(step, under("validation", values) | under("timing/validation", timer.take()))
        self.console.say(f"validation after step {step}: {said}")


@dataclass(frozen=True)
class ValidationTimes:
    """Steps to validate after: every `period` (0: none), the start, the end."""

    period: int
    at_start: bool
    at_end: bool

    def due(self, step: int, total: int) -> bool:
        if step == 0:
            return self.at_start
        return (self.at_end and step == total) or bool(self.period and step % self.period == 0)


@dataclass
class Steps:
    """The steps of a run that has already taken `done`."""

    done: int
    checkpoints: Checkpoints
    stopping: Stopping
    metrics: MetricsLog
    max_skipped: int
    """Number of consecutive steps, skipped because of non-finite gradients, that ends the run."""
    around: Callable[[int], AbstractContextManager[None]]
    """Context of a step."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    _warned: bool = field(default=False, init=False)

    def until(
        self, total: int, times: ValidationTimes, validate: Validate, prepare_to_save: Callable[[], None]
    ) -> Iterator[int]:
        """Yield the steps up to `total`, or until a callback ends the run. `prepare_to_save` moves the policy into its
        training phase before an early checkpoint.

        Raises:
            CallbackError: a user's callback raised.
            RunStopped: a signal, a request or a time limit stopped the run; the state is saved.
            CheckpointError: the state could not be saved.
            TrainingError: too many consecutive steps were skipped.
        """
        # Without checkpoints, a signal ends the run at once.
        with self.stopping.listening(signals=self.checkpoints.enabled):
            seen = {name for entry in self.metrics.history if entry["step"] == self.done for name in entry}
            has_validated = any(name.startswith("validation/") for name in seen)
            if times.due(self.done, total) and not has_validated:
                self.checkpoints.measured(self.done, validate(self.done))
            for step in range(self.done + 1, total + 1):
                note_progress(step=step, total=total)
                with self.around(step):
                    yield step
                self._count_skipped()
                self._warn_of_no_gradient(step)
                if validated := times.due(step, total):
                    self.checkpoints.measured(step, validate(step))
                if self.callbacks.step_done(step, self.metrics.history) and step < total:
                    if not validated and times.due(step, step):
                        self.checkpoints.measured(step, validate(step))
                    if self.checkpoints.enabled:
                        prepare_to_save()
                        self.checkpoints.save(step)
                    return
                self.checkpoints.finish_if_written()
                reason = self.stopping.after_step(self.checkpoints.longest_save_s)
                if reason and step < total:
                    prepare_to_save()
                    self.checkpoints.save(step)
                    self.checkpoints.finish()
                    self.checkpoints.require()
                    raise RunStopped(step, total, reason, str(self.checkpoints.store.folder.parent))

    def _warn_of_no_gradient(self, step: int) -> None:
        """Warn once if a step has zero gradients although its advantages differ."""
        steps, norms = self.metrics.series("train/grad_norm")
        if self._warned or steps[-1:] != [step] or norms[-1] != 0:
            return
        largest, smallest = (self.metrics.series(f"train/advantages/{name}")[1] for name in ("max", "min"))
        if not largest or largest[-1] != smallest[-1]:
            self._warned = True
            log.warning("step %d: all gradients are exactly 0, so the step trained nothing: check the loss", step)

    def _count_skipped(self) -> None:
        _, skipped = self.metrics.series("train/skipped_steps")
        recent = skipped[-self.max_skipped :]
        if len(recent) == self.max_skipped and all(share == 1 for share in recent):
            raise TrainingError(
                f"{self.max_skipped} consecutive steps were skipped because of non-finite gradients "
                "(policy.max_skipped_steps): lower the learning rate, or check the samples of these steps"
            )
