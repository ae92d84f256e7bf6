"""Asynchronous rollouts: engines generate for later steps, while the policy trains or between its phases."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.errors import EngineError, WorkerError
from nemo_rl_lite.observability.liveness import note_state, progressed
from nemo_rl_lite.rollout.background import BackgroundLoop
from nemo_rl_lite.rollout.collector import RolloutTask, Show
from nemo_rl_lite.rollout.groups import Group, Players
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.sampler import PendingRollout, Sampler
from nemo_rl_lite.rollout.saved import RolloutState, SavedRollout, Writing, begin_save
from nemo_rl_lite.rollout.source import Engines

log = logging.getLogger(__name__)

# Seconds between two checks for engines.
_LOOK_S = 0.25


class EngineQueue(Protocol):
    """The queues of all engines, as an asynchronous source controls them: see `RequestQueue`."""

    @property
    def has_engines(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    @property
    def unfinished_tokens(self) -> int: ...

    @property
    def idle_s(self) -> float: ...

    async def pause(self) -> None: ...

    def resume(self) -> None: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class Staleness:
    """Limits on the staleness of a rollout."""

    max_age: int
    """Maximum number of steps between the weights that sample a token and those with which its training step begins
    (NeMo-RL's `max_trajectory_age_steps`)."""
    in_flight: bool
    """True if responses in flight continue with new weights. Otherwise one rollout at a time is sampled, with one
    version of the weights."""
    is_partial: bool = False
    """True if engines stop as soon as a step's rollout is complete, and continue the others after the refit."""


@dataclass(eq=False)
class _Begun:
    """The rollout of a later step."""

    draft: PendingRollout
    task: RolloutTask
    rollout: asyncio.Future[Rollout]
    noted: int
    """See `RolloutState`."""


class _RolloutPrefetcher:
    """The part of an `AsyncRolloutSource` in the engines' thread. The main thread uses only `tasks`."""

    def __init__(
        self,
        sampler: Sampler,
        queue: EngineQueue,
        staleness: Staleness,
        done: int,
        steps: int,
        saved: Sequence[SavedRollout],
    ):
        self._sampler, self._queue, self._staleness, self._steps = sampler, queue, staleness, steps
        self._saved = self._young_enough(saved)
        self._next, self.version = done + 1, done
        self.players: Players | None = None
        """None until the engines have weights."""
        self._begun: dict[int, _Begun] = {}
        self._taken: _Begun | None = None
        """The last rollout, until its training ends."""
        # True if no other rollout may start.
        self._is_held = False

    async def take(self, step: int) -> Rollout:
        """Wait for the rollout of a step."""
        if step not in self._begun:
            raise RuntimeError(f"no rollout of step {step} was started, only those of {sorted(self._begun)}")
        one = self._begun[step]
        await asyncio.wait([one.rollout])
        rollout = one.rollout.result()
        while rollout.is_lost:
            noted = len(one.draft.draws)
            one.task.forget(noted)
            rollout = self._sampler.finish(one.draft, await self.gather(one.task, step), noted)
        self._taken = self._begun.pop(step)
        return rollout

    async def take_again(self, step: int) -> Rollout:
        """Sample what the last rollout has lost since."""
        if self._taken is None:
            raise RuntimeError(f"no rollout of step {step} was taken")
        self._begun[step] = self._taken
        return await self.take(step)

    async def wait_until_idle(self) -> None:
        """Start no rollout until `release`, and wait for the unfinished ones."""
        self._is_held = True
        while (running := self._unfinished()) and self._queue.has_engines:
            await asyncio.wait([one.rollout for one in running], timeout=_LOOK_S)
        self._raise_failed()

    async def pause(self) -> None:
        """Pause the engines for a refit."""
        try:
            await self._queue.pause()
        except (EngineError, WorkerError):
            # The error reaches all unfinished rollouts; raise it with the step.
            await asyncio.gather(*(one.rollout for one in self._unfinished()), return_exceptions=True)
            self._raise_failed()
            raise
        self._raise_failed()

    async def resume(self, version: int) -> None:
        """Resume the engines with this step's weights."""
        self.version, self._taken = version, None
        await self.wake()
        await self.release()

    async def wake(self) -> None:
        """Resume the engines after `pause`."""
        self._queue.resume()

    async def release(self) -> None:
        """Start rollouts again."""
        self._is_held = False
        self._begin()

    async def gather(self, task: RolloutTask, step: int) -> Rollout:
        """Sample a task of a step, such as a validation."""
        if self.players is None:
            raise RuntimeError("the engines have no weights yet")
        return await self._sampler.gather(task, step, self.players)

    async def begin_save(self, folder: Path | None) -> tuple[dict[str, Any], list[Callable[[], None]]]:
        """Return the sampler's state. Start to write the rollouts of later steps to `folder`, and return functions that
        complete them."""
        self._raise_failed()
        states = {step: _state(one) for step, one in sorted(self._begun.items())}
        draws = [*(one.draws for one in states.values()), *(one.state.draws for one in self._saved.values())]
        state = {**self._sampler.state(), "ahead": list(chain.from_iterable(draws))}
        if folder is None:
            return state, []
        store = None if self.players is None else self.players.store
        ends = []
        for step, own in states.items():
            groups = dict(enumerate(self._begun[step].task.groups[: len(own.draws)]))
            done = {number: group.episodes for number, group in groups.items() if group.is_done}
            ends.append(begin_save(folder, own, done, store, partial(self._save_begun, groups)))
        for saved in self._saved.values():
            read = {number: own for number, group in saved.groups.items() if (own := group.read())}
            ends.append(begin_save(folder, saved.state, read, None))
        return state, ends

    def _save_begun(self, groups: Mapping[int, Group], file: Path) -> Writing:
        unfinished = {number: group for number, group in groups.items() if not group.played.done()}
        # Otherwise a rollout has the weights of one version.
        if self.players is None or not self._staleness.in_flight or not unfinished:
            return list
        return self.players.save_begun(unfinished, file)

    def tasks(self) -> list[RolloutTask]:
        return [one.task for one in self._unfinished()]

    def _begin(self) -> None:
        """Start the rollouts for which the weights are fresh enough."""
        while self._next <= self._steps and self._next - 1 - self.version <= self._staleness.max_age:
            if self._is_held or (self._unfinished() and not self._staleness.in_flight):
                return
            step, self._next = self._next, self._next + 1
            saved = self._saved.pop(step, None)
            draft = PendingRollout(step, saved.state.draws if saved else [])
            task, noted = self._sampler.task(draft, saved), saved.state.noted if saved else 0
            future = asyncio.ensure_future(self._sample(draft, task, noted))
            self._begun[step] = _Begun(draft, task, future, noted)
            future.add_done_callback(self._ended)

    async def _sample(self, draft: PendingRollout, task: RolloutTask, noted: int) -> Rollout:
        return self._sampler.finish(draft, await self.gather(task, draft.step), noted)

    def _ended(self, future: asyncio.Task[Rollout]) -> None:
        # An error is raised in the main thread.
        if not future.cancelled() and future.exception() is None:
            self._begin()

    def _young_enough(self, saved: Sequence[SavedRollout]) -> dict[int, SavedRollout]:
        """Return the rollouts by step that are not too stale, and give back the prompts of the others."""
        kept = {}
        for one in saved:
            step, oldest = one.state.step, one.oldest
            age = -1 if oldest is None else step - 1 - oldest
            if age <= self._staleness.max_age:
                kept[step] = one
                continue
            log.warning("the saved rollout of step %d is %d steps stale: it is sampled again", step, age)
            self._sampler.order.give_back(one.state.draws)
        return kept

    def _unfinished(self) -> list[_Begun]:
        return [one for one in list(self._begun.values()) if not one.rollout.done()]

    def _raise_failed(self) -> None:
        for one in self._begun.values():
            if one.rollout.done():
                one.rollout.result()


def _state(one: _Begun) -> RolloutState:
    """Return the state of a rollout for a checkpoint."""
    draws, done = list(one.draft.draws), one.rollout.done()
    noted, spent_s = (len(draws), one.rollout.result().took_s) if done else (one.noted, one.task.took_s)
    return RolloutState(one.draft.step, draws, noted, spent_s)


class QueuedEngines(Engines, Protocol):
    """Engines with a request queue."""

    @property
    def queue(self) -> EngineQueue: ...


class AsyncRolloutSource:
    """Starts the rollout of a step as soon as the weights are fresh enough. Rollouts are trained on in order, so short
    responses are not preferred. At most `max_age + 1` rollouts exist.

    With an age of 1, and not in flight, this is one-step-off training. The rollout of step k + 1 is generated while
    step k trains; seed, step and the previous weights determine it.

    Partial rollouts leave the devices to the policy while it works. Unfinished responses keep their tokens.
    """

    def __init__(
        self,
        sampler: Sampler,
        engines: QueuedEngines,
        staleness: Staleness,
        done: int,
        steps: int,
        saved: Sequence[SavedRollout],
        stall_s: float,
        saves_begun: bool = True,
    ):
        """`done` of `steps` are taken. `saved`: rollouts of the checkpoint. `stall_s`: time limit without progress.
        `saves_begun`: whether `save` writes rollouts or only their prompts."""
        self._sampler, self._engines, self._staleness = sampler, engines, staleness
        self._stall_s, self._saves_begun = stall_s, saves_begun
        self._prefetcher = _RolloutPrefetcher(sampler, engines.queue, staleness, done, steps, saved)
        self._thread_loop = BackgroundLoop("rollouts", sampler.collector.playground.serving)
        self._validation: RolloutTask | None = None
        self._memory: dict[str, float] = {}
        self._idle_before = 0.0
        # Since when the engines are paused, and how long they took to stop; None while they work.
        self._paused: tuple[float, float] | None = None

    def take(self, step: int, show: Show) -> Rollout:
        rollout = self._wait(self._prefetcher.take(step), show)
        idle = self._engines.queue.idle_s
        rollout.engines_idle_s, self._idle_before = idle - self._idle_before, idle
        return rollout

    def take_again(self, step: int, show: Show) -> Rollout:
        if self._staleness.is_partial:
            # The engines may have released their weights.
            self._engines.refit(self._prefetcher.version)
            self._run(self._prefetcher.wake())
            self._resumed()
        return self._wait(self._prefetcher.take_again(step), show)

    def finish_generation(self) -> dict[str, float]:
        if self._staleness.is_partial:
            self._pause()
            self._memory = self._engines.finish_generation()
        return self._memory

    def wait_until_idle(self, show: Show) -> None:
        if not self._staleness.in_flight:
            self._wait(self._prefetcher.wait_until_idle(), show, restores=False)

    def publish(self, step: int) -> dict[str, float]:
        if self._prefetcher.players is None:
            metrics = self._engines.refit(step)
            self._prefetcher.players = self._thread_loop.start()
        else:
            self._pause()
            metrics = self._engines.refit(step)
        if not self._staleness.is_partial:
            self._memory = self._engines.finish_generation()
        self._run(self._prefetcher.resume(step))
        return metrics | self._resumed()

    def held_out(self, step: int, show: Show) -> Rollout:
        self.wait_until_idle(show)
        self._validation = self._sampler.held_out_task(step)
        try:
            return self._wait(self._prefetcher.gather(self._validation, step), show)
        finally:
            self._validation = None
            self._run(self._prefetcher.release())

    def save(self, folder: Path) -> Mapping[str, Any]:
        state, ends = self._run(self._prefetcher.begin_save(folder if self._saves_begun else None))
        for end in ends:
            end()
        return state

    def close(self) -> None:
        self._thread_loop.close()

    def _pause(self) -> None:
        """Pause the engines, unless they are paused."""
        if self._paused is None:
            began = time.perf_counter()
            self._run(self._prefetcher.pause())
            since = time.perf_counter()
            self._paused = since, since - began

    def _resumed(self) -> dict[str, float]:
        """Note the end of a pause, if there was one, and return its metrics."""
        if self._paused is None:
            return {}
        (since, took_s), self._paused = self._paused, None
        paused_s = time.perf_counter() - since
        for task in self._prefetcher.tasks():
            task.paused_s += paused_s if task.began < since else 0.0
        return {"pause_s": took_s, "paused_s": paused_s}

    def _run[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._thread_loop.wait(coroutine, lambda: None)

    def _wait[Result](self, coroutine: Coroutine[Any, Any, Result], show: Show, restores: bool = True) -> Result:
        """Wait for the thread as long as engines, environments or rewards make progress. Let engines join; if none is
        left, wait for them."""
        queue, seen, since = self._engines.queue, (-1, -1), time.monotonic()

        def look() -> None:
            nonlocal seen, since
            if restores and not queue.has_engines:
                self.publish(self._prefetcher.version)
            elif restores:
                self._engines.admit()
            sampled = self._prefetcher.tasks()
            sampled = [self._validation, *sampled] if self._validation is not None else sampled
            now = (queue.steps, sum(one.answers for one in sampled))
            if now != seen:
                seen, since = now, time.monotonic()
                progressed()
            # With several rollouts, the engine's tokens cannot be attributed to one.
            tokens = queue.unfinished_tokens if len(sampled) == 1 else 0
            waits = "; ".join([queue.describe(), *(one.progress(tokens) for one in sampled[:1])])
            note_state(waits)
            if time.monotonic() - since > self._stall_s:
                limit = f"{self._stall_s:g} s (cluster.phase_timeout_s)"
                stalled = f"no engine worked for {limit}, and nothing else finished: {waits}"
                raise WorkerError("rollouts", "generate", stalled)
            if sampled:
                others = f"; {len(sampled) - 1} more rollouts in flight" if len(sampled) > 1 else ""
                show(sampled[0].progress(tokens) + others)

        return self._thread_loop.wait(coroutine, look)
