"""Where the loop gets its rollouts from, and when the engines get new weights."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.observability.limits import progressed
from nemo_rl_lite.rollout.collector import Show
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.sampler import Sampler
from nemo_rl_lite.rollout.saved import load_rollout, save_rollout

Refit = Callable[[int], dict[str, float]]
"""Brings the weights that a step made to the engines; returns metrics."""

# Seconds between two looks at a rollout that others generate.
_LOOK_S = 0.25
# Seconds that the thread has to end.
_END_S = 10.0


class RolloutSource(Protocol):
    """In each step the loop takes a rollout, trains on it, waits until the engines may have new weights, and publishes
    those."""

    def take(self, step: int, show: Show) -> Rollout:
        """Return the rollout of a step; `show` is told how far it is."""
        ...

    def finish_generation(self) -> dict[str, float]:
        """The policy needs its devices: leave those that it shares with engines. Returns metrics of their memory."""
        ...

    def settle(self, show: Show) -> None:
        """Wait until no engine works."""
        ...

    def publish(self, step: int) -> dict[str, float]:
        """Bring the weights that this step made to the engines, which have settled; returns metrics."""
        ...

    def held_out(self, step: int, show: Show) -> Rollout:
        """Sample the held-out problems with the engines' present weights."""
        ...

    def save(self, folder: Path) -> Mapping[str, Any]:
        """Return what a checkpoint needs, for a run that resumes from it; what is large is written to the folder."""
        ...

    def close(self) -> None:
        """The run ends, in whatever way: leave nothing that works for it."""
        ...


class OnPolicy:
    """Generates, then trains on it: each rollout is sampled by the weights that it trains."""

    def __init__(self, sampler: Sampler, refit: Refit, finish_generation: Callable[[], dict[str, float]]):
        self._sampler, self._refit, self._finish = sampler, refit, finish_generation

    def take(self, step: int, show: Show) -> Rollout:
        return self._sampler.rollout(step, show)

    def finish_generation(self) -> dict[str, float]:
        return self._finish()

    def settle(self, show: Show) -> None: ...

    def publish(self, step: int) -> dict[str, float]:
        return self._refit(step)

    def held_out(self, step: int, show: Show) -> Rollout:
        return self._sampler.held_out(step, show)

    def save(self, folder: Path) -> Mapping[str, Any]:
        return self._sampler.state()

    def close(self) -> None: ...


class OneStepOff:
    """While a step trains, engines on devices of their own generate the next step's rollout, with the weights from
    before that step: every rollout but the first is one optimizer step old. It is a function of run, step and the
    weights one step back, like `OnPolicy` of the weights.

    A checkpoint has the next step's rollout, which the weights in it could not sample again.
    """

    def __init__(self, sampler: Sampler, refit: Refit, done: int, steps: int, saved: Path | None):
        """The run has taken `done` of its `steps`; `saved` is the checkpoint's folder with what `save` wrote."""
        self._sampler, self._refit, self._steps = sampler, refit, steps
        self._ready = load_rollout(saved) if saved is not None else None
        self._next = done + 1 + (self._ready is not None)
        self._under_way: Future[Rollout] | None = None
        # The sampler's state before the rollout that is ready, and before the one that was begun last.
        self._before_ready = self._before = sampler.state()
        self._progress, self._beats = "", 0
        self._thread: threading.Thread | None = None

    def take(self, step: int, show: Show) -> Rollout:
        rollout, self._ready = self._next_one(show), None
        if rollout is None:
            raise RuntimeError(f"no rollout of step {step} was begun")
        self._begin()
        return rollout

    def finish_generation(self) -> dict[str, float]:
        return {}

    def settle(self, show: Show) -> None:
        seen = self._beats
        while self._under_way is not None and not _is_done(self._under_way):
            # The launcher's limit is for what works without a sign of life.
            if self._beats != seen:
                seen = self._beats
                progressed()
            show(self._progress)

    def publish(self, step: int) -> dict[str, float]:
        self._next_one(lambda _: None)
        metrics = self._refit(step)
        self._begin()
        return metrics

    def held_out(self, step: int, show: Show) -> Rollout:
        self.settle(show)
        return self._sampler.held_out(step, show)

    def save(self, folder: Path) -> Mapping[str, Any]:
        rollout = self._next_one(lambda _: None)
        after = self._sampler.state() if self._under_way is None else self._before
        if rollout is None:
            return after
        save_rollout(rollout, folder)
        # For a run that cannot use that rollout.
        return {**after, "before": self._before_ready}

    def close(self) -> None:
        """See `RolloutSource.close`. The thread's calls would go on after the end of the run."""
        if self._thread is not None:
            self._sampler.cancel()
            self._thread.join(_END_S)

    def _next_one(self, show: Show) -> Rollout | None:
        """The rollout that the loop takes next, when it is ready; None where none was begun."""
        if self._ready is None and self._under_way is not None:
            self.settle(show)
            self._ready, self._under_way, self._before_ready = self._under_way.result(), None, self._before
        return self._ready

    def _begin(self) -> None:
        """Begin the next rollout, where the engines are free and a step is left for it."""
        if self._under_way is None and self._next <= self._steps:
            self._before = self._sampler.state()
            self._under_way, step = Future(), self._next
            self._next += 1
            own = (self._under_way, step)
            self._thread = threading.Thread(target=self._generate, args=own, name="rollout", daemon=True)
            self._thread.start()

    def _generate(self, result: Future[Rollout], step: int) -> None:
        try:
            result.set_result(self._sampler.rollout(step, self._note))
        except BaseException as error:  # whatever it is, it belongs to the step that waits for the rollout
            result.set_exception(error)

    def _note(self, progress: str) -> None:
        self._progress, self._beats = progress, self._beats + 1


def _is_done(future: Future[Rollout]) -> bool:
    """Whether it is done, now or within a moment."""
    try:
        future.exception(_LOOK_S)
    except TimeoutError:
        return False
    return True
