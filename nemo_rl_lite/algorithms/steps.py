"""The steps that a run has left and, between them, what every algorithm does: validate, save, stop early."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from nemo_rl_lite.checkpoint.checkpoints import Checkpoints
from nemo_rl_lite.errors import RunStopped, TrainingError
from nemo_rl_lite.host.stopping import Stopping
from nemo_rl_lite.observability.trackers import MetricsLog

log = logging.getLogger(__name__)

# Runs the validation after a step and returns its metrics, under the names that `algorithm.val_metric` knows.
Validate = Callable[[int], Mapping[str, float]]


@dataclass(frozen=True)
class ValidationTimes:
    """When to validate: every `period` steps (0: never), before the first, after the last."""

    period: int
    at_start: bool
    at_end: bool

    def due(self, step: int, total: int) -> bool:
        if step == 0:
            return self.at_start
        return (self.at_end and step == total) or bool(self.period and step % self.period == 0)


@dataclass
class Steps:
    """Yields the steps of a run that has taken `done` steps before."""

    done: int
    checkpoints: Checkpoints
    stopping: Stopping
    metrics: MetricsLog
    max_skipped: int
    """The most steps in a row that may be skipped because their gradients are not finite."""
    around: Callable[[int], AbstractContextManager[None]]
    """Returns the context in which a step of this number is taken."""
    _warned: bool = field(default=False, init=False)

    def until(
        self, total: int, times: ValidationTimes, validate: Validate, prepare_to_save: Callable[[], None]
    ) -> Iterator[int]:
        """Yield the numbers of the steps to take, up to `total`. `prepare_to_save` brings the policy into its training
        phase when a run ends early.

        Raises:
            RunStopped: a signal came, or time is up; the state is saved.
            CheckpointError: the state could not be saved.
            TrainingError: too many steps in a row were skipped.
        """
        with self.stopping.listening() if self.checkpoints.enabled else nullcontext():
            if times.due(self.done, total) and not self._has_validated(self.done):
                self.checkpoints.measured(self.done, validate(self.done))
            for step in range(self.done + 1, total + 1):
                with self.around(step):
                    yield step
                self._count_skipped()
                self._warn_of_no_gradient(step)
                if times.due(step, total):
                    self.checkpoints.measured(step, validate(step))
                self.checkpoints.settle()
                reason = self.stopping.after_step(self.checkpoints.longest_save_s) if self.checkpoints.enabled else None
                if reason and step < total:
                    prepare_to_save()
                    self.checkpoints.save(step)
                    self.checkpoints.finish()
                    self.checkpoints.require()
                    raise RunStopped(step, total, reason, str(self.checkpoints.store.folder.parent))

    def _warn_of_no_gradient(self, step: int) -> None:
        """Warn, once, of a step that trained nothing, unless that is because all its advantages are the same."""
        steps, norms = self.metrics.series("train/grad_norm")
        if self._warned or steps[-1:] != [step] or norms[-1] != 0:
            return
        largest, smallest = (self.metrics.series(f"train/advantages/{name}")[1] for name in ("max", "min"))
        if not largest or largest[-1] != smallest[-1]:
            self._warned = True
            log.warning("step %d: all gradients are exactly 0, so that nothing was trained: look at the loss", step)

    def _has_validated(self, step: int) -> bool:
        return any(
            entry["step"] == step and any(name.startswith("validation/") for name in entry)
            for entry in self.metrics.history
        )

    def _count_skipped(self) -> None:
        _, skipped = self.metrics.series("train/skipped_steps")
        recent = skipped[-self.max_skipped :]
        if len(recent) == self.max_skipped and all(share == 1 for share in recent):
            raise TrainingError(
                f"{self.max_skipped} steps in a row had no finite gradients and were left out "
                "(policy.max_skipped_steps): try a smaller learning rate, or look at the samples of these steps"
            )
