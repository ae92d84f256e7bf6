"""Saves a run's checkpoints while it trains."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.checkpoint.store import CheckpointStore
from nemo_rl_lite.errors import CheckpointError

log = logging.getLogger(__name__)

# The policy's part of a checkpoint's folder.
POLICY = "policy"


SaveRollouts = Callable[[Path], Mapping[str, Any]]
"""Returns what the source of rollouts needs to resume; what is large it writes to the checkpoint's folder."""


def save_none(_: Path) -> Mapping[str, Any]:
    """Of a run that generates nothing."""
    return {}


class Saver(Protocol):
    """The part of a policy that saving needs."""

    def begin_save(self, folder: str) -> None: ...

    def save_is_written(self) -> bool: ...

    def finish_save(self) -> dict[str, str]:
        """Wait until it is written; returns digests of some of its files, by name."""
        ...


class Checkpoints:
    """Saves every `period` steps (0: never) and on request; writes at most one checkpoint at a time.

    A checkpoint that cannot be written is a warning and does not end the training; `require` raises if the last failed.
    """

    def __init__(
        self,
        store: CheckpointStore,
        policy: Saver,
        period: int,
        asynchronous: bool,
        record: Mapping[str, Any],
        say: Callable[[str], None],
        saved: int | None = None,
        rollouts: SaveRollouts = save_none,
    ):
        """`record` is written into every checkpoint, for the run that resumes from it, and so is what `rollouts`
        returns. `saved`: the step that this run was resumed from."""
        self.store, self._policy, self._period, self._asynchronous = store, policy, period, asynchronous
        self._record, self._say, self._rollouts = dict(record), say, rollouts
        self._writing: int | None = None
        self._saved = saved
        self._begun_s = 0.0
        self.longest_save_s = 0.0
        self._failure: CheckpointError | None = None
        self._measured: tuple[int, dict[str, float]] = (-1, {})

    @property
    def enabled(self) -> bool:
        return self._period > 0

    def save_if_due(self, step: int, last: bool) -> None:
        """Save after every `period`-th step and after the last."""
        if self._period and (last or step % self._period == 0):
            self.save(step)

    def save(self, step: int) -> None:
        """Save the state after `step`, once, in the policy's training phase. Training may continue when this returns,
        overlapped with the writing."""
        if not self._period or step == self._saved:
            return
        self.finish()
        self._saved, self._failure, self._begun_s = step, None, time.monotonic()
        try:
            folder = self.store.begin(step)
            self._record |= {"rollouts": dict(state)} if (state := self._rollouts(folder)) else {}
            (folder / POLICY).mkdir()
            self._policy.begin_save(str(folder / POLICY))
        except (CheckpointError, OSError) as error:
            self._fail(step, error)
            return
        self._writing = step
        if not self._asynchronous:
            self.finish()

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the validation metrics of `step`, which decide what the best checkpoints are."""
        self._measured = (step, dict(metrics))
        try:
            if step != self._writing:
                self.store.measured(step, metrics)
        except CheckpointError as error:
            self._say(f"warning: {error}")

    def settle(self) -> None:
        """Complete the current checkpoint if it is written, without waiting."""
        if self._writing is not None and self._policy.save_is_written():
            self.finish()

    def require(self) -> None:
        """Raise CheckpointError where the last checkpoint was not written."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait for the current checkpoint, and complete it."""
        step, self._writing = self._writing, None
        if step is None:
            return
        try:
            digests = {f"{POLICY}/{name}": digest for name, digest in self._policy.finish_save().items()}
            measured_at, metrics = self._measured
            saved = self.store.finish(step, metrics if measured_at == step else {}, self._record, digests)
            self.longest_save_s = max(self.longest_save_s, time.monotonic() - self._begun_s)
            log.info("checkpoint of step %d: %s", step, saved.path)
        except CheckpointError as error:
            self._fail(step, error)

    def _fail(self, step: int, error: Exception) -> None:
        self.store.discard(step)
        newest = self.store.latest()
        there = f"the newest checkpoint is of step {newest.step}" if newest else "there is none yet"
        self._failure = CheckpointError(f"the checkpoint of step {step} was not written: {error}; {there}")
        self._say(f"warning: {self._failure}")
