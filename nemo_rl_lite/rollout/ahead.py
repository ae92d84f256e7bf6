"""Rollouts of coming steps, which engines on devices of their own generate while the policy trains."""

import time
from collections.abc import Coroutine, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.observability.liveness import progressed
from nemo_rl_lite.rollout import coming, source
from nemo_rl_lite.rollout.background import Background
from nemo_rl_lite.rollout.collector import Gathering, Show
from nemo_rl_lite.rollout.coming import ComingRollouts, Staleness
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.sampler import Sampler
from nemo_rl_lite.rollout.saved import SavedRollout, save_rollouts


class Steering(coming.Steering, Protocol):
    """The queue of requests, as this source steers it."""

    exchanges: int

    @property
    def idle_s(self) -> float: ...

    def describe(self) -> str: ...


class Engines(source.Engines, Protocol):
    """Engines on devices of their own."""

    @property
    def queue(self) -> Steering: ...


class Queue:
    """Begins the rollout of a step as soon as its weights are new enough, and trains on the rollouts in the order of
    their steps, so that short responses are not preferred. At most `max_age + 1` rollouts exist, whatever happens.

    With an age of 1, and not in flight, it is one-step-off training: the rollout of step k + 1 is generated while step
    k trains, and is a function of run, step and the weights one step back.
    """

    def __init__(
        self,
        sampler: Sampler,
        engines: Engines,
        staleness: Staleness,
        done: int,
        steps: int,
        saved: Sequence[SavedRollout],
        stall_s: float,
        saves_begun: bool = True,
    ):
        """The run has taken `done` of its `steps`. `saved`: what `save` wrote to the checkpoint. `stall_s`: seconds
        without a sign of life of the engines after which the run ends. `saves_begun`: whether `save` writes the
        rollouts, and not their prompts alone."""
        self._sampler, self._engines, self._staleness = sampler, engines, staleness
        self._stall_s, self._saves_begun = stall_s, saves_begun
        self._coming = ComingRollouts(sampler, engines.queue, staleness, done, steps, saved)
        self._background = Background("rollouts", sampler.collector.serving)
        self._validation: Gathering | None = None
        self._memory: dict[str, float] = {}
        self._idle_before = 0.0

    def take(self, step: int, show: Show) -> Rollout:
        rollout = self._wait(self._coming.take(step), show)
        idle = self._engines.queue.idle_s
        rollout.engines_idle_s, self._idle_before = idle - self._idle_before, idle
        return rollout

    def finish_generation(self) -> dict[str, float]:
        return self._memory

    def settle(self, show: Show) -> None:
        if not self._staleness.in_flight:
            self._wait(self._coming.settle(), show, restores=False)

    def publish(self, step: int) -> dict[str, float]:
        if self._coming.requests is None:
            metrics, stopped = self._engines.refit(step), 0.0
            self._coming.requests = self._background.start()
        else:
            began = time.perf_counter()
            self._run(self._coming.pause())
            stopped = time.perf_counter() - began
            metrics = self._engines.refit(step)
        self._memory = self._engines.finish_generation()
        self._run(self._coming.resume(step))
        return metrics | {"pause_s": stopped}

    def held_out(self, step: int, show: Show) -> Rollout:
        self.settle(show)
        self._validation = self._sampler.held_out_gathering(step)
        try:
            return self._wait(self._coming.gather(self._validation, step), show)
        finally:
            self._validation = None
            self._run(self._coming.release())

    def save(self, folder: Path) -> Mapping[str, Any]:
        state, rollouts = self._run(self._coming.snapshot())
        save_rollouts(rollouts if self._saves_begun else [], folder)
        return {**state, "ahead": list(chain.from_iterable(draw for one in rollouts for draw in one.draws))}

    def close(self) -> None:
        """See `RolloutSource.close`. The thread's calls would go on after the end of the run."""
        self._background.close()

    def _run[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._background.wait(coroutine, progressed)

    def _wait[Result](self, coroutine: Coroutine[Any, Any, Result], show: Show, restores: bool = True) -> Result:
        """Wait for the thread, with a sign of life as long as the engines, environments or rewards work. When no engine
        is left, bring them back."""
        queue, seen, since = self._engines.queue, -1, time.monotonic()

        def look() -> None:
            nonlocal seen, since
            if restores and not queue.has_engines:
                self.publish(self._coming.version)
            sampled = self._coming.gatherings()
            sampled = [self._validation, *sampled] if self._validation is not None else sampled
            if queue.exchanges != seen or any(one.waits_for_others for one in sampled):
                seen, since = queue.exchanges, time.monotonic()
            if time.monotonic() - since > self._stall_s:
                cause = f"no engine worked for {self._stall_s:g} s (cluster.phase_timeout_s): {queue.describe()}"
                raise WorkerError("rollouts", "generate", cause)
            progressed()
            if sampled:
                others = f"; {len(sampled) - 1} more rollouts under way" if len(sampled) > 1 else ""
                show(sampled[0].progress() + others)

        return self._background.wait(coroutine, look)
