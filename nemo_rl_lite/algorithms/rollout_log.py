"""Record of a run's rollouts: sample files, samples on the terminal and in trackers, callbacks."""

from collections.abc import Sequence

from nemo_rl_lite.observability.callbacks import Callbacks
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.sinks import Sample
from nemo_rl_lite.observability.timer import Phase
from nemo_rl_lite.observability.trackers import MetricsLog
from nemo_rl_lite.policy.score_files import WriteScores
from nemo_rl_lite.rollout.rollout import Rollout, Split
from nemo_rl_lite.rollout.store import RolloutFiles, rollout_rows

# Numbers of samples for the terminal (worst and best) and for trackers.
SHOWN, TRACKED = 2, 16


class RolloutLog:
    """Records rollouts. Samples of rollout workers are read or written before a step trains on them."""

    def __init__(
        self, files: RolloutFiles, period: int, console: RunConsole, metrics: MetricsLog, callbacks: Callbacks
    ):
        """`period`: steps between shown samples; 0 shows none."""
        self._files, self._period, self._callbacks = files, period, callbacks
        self._console, self._metrics = console, metrics
        self._shown: tuple[list[Sample], list[Sample]] | None = None

    def begin(self, step: int, split: Split, rollout: Rollout) -> None:
        """Start to record a complete rollout."""
        self._files.begin(step, split, rollout)
        if split == "train" and self._period and step % self._period == 0:
            self._shown = rollout.samples(SHOWN), rollout.samples(TRACKED)

    def scored(self, step: int, rollout: Rollout, write: WriteScores) -> None:
        """Start to record the policy's scores of a rollout after training on it."""
        self._files.scored(step, rollout, write)

    def end(self, step: int, split: Split, rollout: Rollout, phases: Sequence[Phase]) -> None:
        """Record a rollout and the phases of its step, and free the memory of its episodes. Raises WorkerError: a
        rollout worker died before it wrote its samples, or a policy rank before it wrote its scores."""
        self._files.write(step, split, rollout, phases)
        if split == "train" and self._shown is not None:
            (on_terminal, tracked), self._shown = self._shown, None
            self._console.samples(step, on_terminal)
            self._metrics.log_samples(step, tracked)
        self._callbacks.rollout_done(step, lambda: rollout_rows(step, split, rollout))
        rollout.release()
