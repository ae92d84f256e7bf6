"""Rollouts of coming steps, which engines on devices of their own generate while the policy trains."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.errors import EngineError, WorkerError
from nemo_rl_lite.generation.interface import Requests
from nemo_rl_lite.observability.limits import progressed
from nemo_rl_lite.rollout import source
from nemo_rl_lite.rollout.background import LOOK_S, Background
from nemo_rl_lite.rollout.collector import Gathering, Show
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.sampler import Draft, Sampler
from nemo_rl_lite.rollout.saved import SavedRollout, save_rollouts

log = logging.getLogger(__name__)


class Steering(Protocol):
    """The queue of requests, as this source steers it."""

    exchanges: int

    async def pause(self) -> None: ...

    def resume(self) -> None: ...

    @property
    def has_engines(self) -> bool: ...

    @property
    def idle_s(self) -> float: ...

    def describe(self) -> str: ...


class Engines(source.Engines, Protocol):
    """Engines on devices of their own."""

    @property
    def queue(self) -> Steering: ...


@dataclass(frozen=True)
class Staleness:
    """How old a rollout may be."""

    max_age: int
    """The most optimizer steps between the weights that sample a token and those that train on it."""
    in_flight: bool
    """Whether responses continue with new weights. Otherwise rollouts are sampled one at a time, each by the weights of
    one version."""


@dataclass(eq=False)
class _Ahead:
    """The rollout of a coming step: under way, or complete."""

    draft: Draft
    gathering: Gathering | None
    rollout: asyncio.Future[Rollout]

    @property
    def is_under_way(self) -> bool:
        return not self.rollout.done()


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
        self._sampler, self._engines, self._staleness, self._steps = sampler, engines, staleness, steps
        self._saved, self._stall_s, self._saves_begun = self._young_enough(saved), stall_s, saves_begun
        self._next, self._version = done + 1, done
        self._background = Background("rollouts", sampler.collector.serving)
        self._requests: Requests | None = None
        # In the thread: the rollouts by step, and whether no other may begin.
        self._ahead: dict[int, _Ahead] = {}
        self._is_held = False
        self._validation: Gathering | None = None
        self._memory: dict[str, float] = {}
        self._idle_before = 0.0

    def take(self, step: int, show: Show) -> Rollout:
        rollout = self._wait(self._take(step), show)
        idle = self._engines.queue.idle_s
        rollout.engines_idle_s, self._idle_before = idle - self._idle_before, idle
        return rollout

    def finish_generation(self) -> dict[str, float]:
        return self._memory

    def settle(self, show: Show) -> None:
        if not self._staleness.in_flight:
            self._wait(self._settle(), show, restores=False)

    def publish(self, step: int) -> dict[str, float]:
        if self._requests is None:
            metrics, stopped = self._engines.refit(step), 0.0
            self._requests = self._background.start()
        else:
            began = time.perf_counter()
            self._run(self._pause())
            stopped = time.perf_counter() - began
            metrics = self._engines.refit(step)
        self._memory = self._engines.finish_generation()
        self._run(self._resume(step))
        return metrics | {"pause_s": stopped}

    def held_out(self, step: int, show: Show) -> Rollout:
        self.settle(show)
        self._validation = self._sampler.held_out_gathering(step)
        try:
            return self._wait(self._gather(self._validation, step), show)
        finally:
            self._validation = None
            self._run(self._release())

    def save(self, folder: Path) -> Mapping[str, Any]:
        state, rollouts = self._run(self._snapshot())
        save_rollouts(rollouts if self._saves_begun else [], folder)
        return {**state, "ahead": list(chain.from_iterable(draw for one in rollouts for draw in one.draws))}

    def close(self) -> None:
        """See `RolloutSource.close`. The thread's calls would go on after the end of the run."""
        self._background.close()

    # What follows runs in the thread of the engines.

    async def _take(self, step: int) -> Rollout:
        if step not in self._ahead:
            raise RuntimeError(f"no rollout of step {step} was begun; there are those of {sorted(self._ahead)}")
        await asyncio.wait([self._ahead[step].rollout])
        return self._ahead.pop(step).rollout.result()

    async def _settle(self) -> None:
        self._is_held = True
        while (running := self._under_way()) and self._engines.queue.has_engines:
            await asyncio.wait([one.rollout for one in running], timeout=LOOK_S)
        self._raise_failed()

    async def _pause(self) -> None:
        try:
            await self._engines.queue.pause()
        except (EngineError, WorkerError):
            # The same error, with the step: it reaches all rollouts under way.
            await asyncio.gather(*(one.rollout for one in self._under_way()), return_exceptions=True)
            self._raise_failed()
            raise
        self._raise_failed()

    async def _resume(self, version: int) -> None:
        self._version = version
        self._engines.queue.resume()
        await self._release()

    async def _release(self) -> None:
        self._is_held = False
        self._begin()

    async def _gather(self, gathering: Gathering, step: int) -> Rollout:
        return await self._sampler.gather(gathering, step, self._served)

    async def _snapshot(self) -> tuple[dict[str, Any], list[SavedRollout]]:
        self._raise_failed()
        found = []
        for step, one in sorted(self._ahead.items()):
            groups = [] if one.gathering is None else one.gathering.groups
            done = {number: group.episodes for number, group in enumerate(groups) if group.is_done}
            rollout = None if one.is_under_way else one.rollout.result()
            found.append(SavedRollout(step, list(one.draft.draws), rollout, done))
        return self._sampler.order.state(), [*found, *self._saved.values()]

    def _begin(self) -> None:
        """Begin the rollouts whose weights are new enough."""
        while self._next <= self._steps and self._next - 1 - self._version <= self._staleness.max_age:
            if self._is_held or (self._under_way() and not self._staleness.in_flight):
                return
            step, self._next = self._next, self._next + 1
            saved = self._saved.pop(step, None)
            if saved is not None and saved.rollout is not None:
                ready = asyncio.get_running_loop().create_future()
                ready.set_result(saved.rollout)
                self._ahead[step] = _Ahead(Draft(step, saved.draws), None, ready)
                continue
            draft = Draft(step) if saved is None else Draft(step, saved.draws)
            gathering = self._sampler.gathering(draft, saved.done if saved else None)
            task = asyncio.ensure_future(self._sample(draft, gathering))
            self._ahead[step] = _Ahead(draft, gathering, task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Rollout]) -> None:
        # An error is raised when the main thread looks.
        if not task.cancelled() and task.exception() is None:
            self._begin()

    async def _sample(self, draft: Draft, gathering: Gathering) -> Rollout:
        return self._sampler.finish(draft, await self._gather(gathering, draft.step))

    def _young_enough(self, saved: Sequence[SavedRollout]) -> dict[int, SavedRollout]:
        """Return those by step that are not too old for this run, and give back the prompts of the others."""
        kept = {}
        for one in saved:
            age = one.step - 1 - one.oldest
            if age <= self._staleness.max_age:
                kept[one.step] = one
                continue
            log.warning("the rollout of step %d in the checkpoint is %d steps old: it is sampled again", one.step, age)
            self._sampler.order.give_back(chain.from_iterable(one.draws))
        return kept

    def _under_way(self) -> list[_Ahead]:
        return [one for one in list(self._ahead.values()) if one.is_under_way]

    def _raise_failed(self) -> None:
        for one in self._ahead.values():
            if one.rollout.done():
                one.rollout.result()

    @property
    def _served(self) -> Requests:
        if self._requests is None:
            raise RuntimeError("the engines have no weights yet")
        return self._requests

    # And this in the main thread.

    def _run[Result](self, coroutine: Any) -> Result:
        return self._background.wait(coroutine, progressed)

    def _wait[Result](self, coroutine: Any, show: Show, restores: bool = True) -> Result:
        """Wait for the thread, with a sign of life as long as the engines, environments or rewards work. When no engine
        is left, bring them back."""
        queue, seen, since = self._engines.queue, -1, time.monotonic()

        def look() -> None:
            nonlocal seen, since
            if restores and not queue.has_engines:
                self.publish(self._version)
            sampled = [one.gathering for one in self._under_way() if one.gathering is not None]
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
