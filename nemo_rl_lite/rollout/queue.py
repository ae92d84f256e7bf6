"""Asynchronous rollouts: engines on their own devices generate for coming steps while the policy trains."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.errors import EngineError, WorkerError
from nemo_rl_lite.generation.interface import Requests
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.observability.liveness import note_state, progressed
from nemo_rl_lite.rollout.collector import RolloutTask, Show
from nemo_rl_lite.rollout.episode import Rollout
from nemo_rl_lite.rollout.sampler import PendingRollout, Sampler
from nemo_rl_lite.rollout.source import Engines
from nemo_rl_lite.rollout.store import SavedRollout, save_rollouts

log = logging.getLogger(__name__)

# Seconds between two looks of the main thread while it waits.
_LOOK_S = 0.25
# Seconds that the thread has to end.
_END_S = 10.0


class BackgroundLoop[Served]:
    """An event loop in a thread, which enters `serving()` once and runs coroutines of the main thread inside it."""

    def __init__(self, name: str, serving: Callable[[], AbstractAsyncContextManager[Served]]):
        self._serving = serving
        self._started: Future[Served] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Served:
        """Start the thread; returns what `serving()` yields, and raises what it raises."""
        self._thread.start()
        return self._started.result()

    def wait[Result](self, coroutine: Coroutine[Any, Any, Result], look: Callable[[], None]) -> Result:
        """Run a coroutine in the thread; `look` is called several times a second, and an error of it ends the wait."""
        if self._loop is None:
            raise RuntimeError("the thread has not started")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not wait([future], _LOOK_S).done:
                if not self._thread.is_alive():
                    raise RuntimeError(f"the thread {self._thread.name!r} has ended")
                look()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def close(self) -> None:
        """End the thread and all its coroutines."""
        if self._loop is not None and self._main is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # for the thread that waits for the start
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        async with self._serving() as served:
            self._started.set_result(served)
            await asyncio.Event().wait()


@dataclass(frozen=True)
class Staleness:
    """Limits on the age of a rollout."""

    max_age: int
    """Most steps between the weights that sample a token and those with which the step that trains on it begins
    (NeMo-RL's `max_trajectory_age_steps`)."""
    in_flight: bool
    """True if responses continue with new weights. Otherwise rollouts are sampled one at a time, each by the weights of
    one version."""


@dataclass(eq=False)
class _Begun:
    """The rollout of a coming step, sampled by `task` or complete in the checkpoint."""

    draft: PendingRollout
    task: RolloutTask | None
    rollout: asyncio.Future[Rollout]


class _RolloutPrefetcher:
    """The part of an `AsyncRolloutSource` in the thread of the engines; the main thread looks only at `tasks`."""

    def __init__(
        self,
        sampler: Sampler,
        queue: RequestQueue,
        staleness: Staleness,
        done: int,
        steps: int,
        saved: Sequence[SavedRollout],
    ):
        self._sampler, self._queue, self._staleness, self._steps = sampler, queue, staleness, steps
        self._saved = self._young_enough(saved)
        self._next, self.version = done + 1, done
        self.requests: Requests | None = None
        """None until the engines have weights."""
        self._begun: dict[int, _Begun] = {}
        # Whether no other rollout may begin.
        self._is_held = False

    async def take(self, step: int) -> Rollout:
        """Wait for the rollout of a step."""
        if step not in self._begun:
            raise RuntimeError(f"no rollout of step {step} was begun; there are those of {sorted(self._begun)}")
        await asyncio.wait([self._begun[step].rollout])
        return self._begun.pop(step).rollout.result()

    async def wait_until_idle(self) -> None:
        """Begin no rollout until `release`, and wait for the unfinished ones."""
        self._is_held = True
        while (running := self._unfinished()) and self._queue.has_engines:
            await asyncio.wait([one.rollout for one in running], timeout=_LOOK_S)
        self._raise_failed()

    async def pause(self) -> None:
        """Stop the engines for new weights."""
        try:
            await self._queue.pause()
        except (EngineError, WorkerError):
            # The same error, with the step: it reaches all unfinished rollouts.
            await asyncio.gather(*(one.rollout for one in self._unfinished()), return_exceptions=True)
            self._raise_failed()
            raise
        self._raise_failed()

    async def resume(self, version: int) -> None:
        """Continue with this step's weights."""
        self.version = version
        self._queue.resume()
        await self.release()

    async def release(self) -> None:
        """Begin rollouts again."""
        self._is_held = False
        self._begin()

    async def gather(self, task: RolloutTask, step: int) -> Rollout:
        """Sample a task of a step, such as a validation."""
        if self.requests is None:
            raise RuntimeError("the engines have no weights yet")
        return await self._sampler.gather(task, step, self.requests)

    async def snapshot(self) -> tuple[dict[str, Any], list[SavedRollout]]:
        """Return the place in the data, and the rollouts that come next."""
        self._raise_failed()
        found = []
        for step, one in sorted(self._begun.items()):
            groups = [] if one.task is None else one.task.groups
            done = {number: group.episodes for number, group in enumerate(groups) if group.is_done}
            rollout = one.rollout.result() if one.rollout.done() else None
            found.append(SavedRollout(step, list(one.draft.draws), rollout, done))
        return self._sampler.state(), [*found, *self._saved.values()]

    def tasks(self) -> list[RolloutTask]:
        """Tasks of the unfinished rollouts."""
        return [one.task for one in self._unfinished() if one.task is not None]

    def _begin(self) -> None:
        """Begin the rollouts whose weights are new enough."""
        while self._next <= self._steps and self._next - 1 - self.version <= self._staleness.max_age:
            if self._is_held or (self._unfinished() and not self._staleness.in_flight):
                return
            step, self._next = self._next, self._next + 1
            saved = self._saved.pop(step, None)
            draft = PendingRollout(step, saved.draws if saved else [])
            if saved is not None and saved.rollout is not None:
                ready = asyncio.get_running_loop().create_future()
                ready.set_result(saved.rollout)
                self._begun[step] = _Begun(draft, None, ready)
                continue
            task = self._sampler.task(draft, saved.done if saved else None)
            future = asyncio.ensure_future(self._sample(draft, task))
            self._begun[step] = _Begun(draft, task, future)
            future.add_done_callback(self._ended)

    async def _sample(self, draft: PendingRollout, task: RolloutTask) -> Rollout:
        return self._sampler.finish(draft, await self.gather(task, draft.step))

    def _ended(self, future: asyncio.Task[Rollout]) -> None:
        # An error is raised when the main thread looks.
        if not future.cancelled() and future.exception() is None:
            self._begin()

    def _young_enough(self, saved: Sequence[SavedRollout]) -> dict[int, SavedRollout]:
        """Return the rollouts, by step, that are not too old for this run, and give back the prompts of the others."""
        kept = {}
        for one in saved:
            age = one.step - 1 - one.oldest
            if age <= self._staleness.max_age:
                kept[one.step] = one
                continue
            log.warning("the rollout of step %d in the checkpoint is %d steps old: it is sampled again", one.step, age)
            self._sampler.order.give_back(chain.from_iterable(one.draws))
        return kept

    def _unfinished(self) -> list[_Begun]:
        return [one for one in list(self._begun.values()) if not one.rollout.done()]

    def _raise_failed(self) -> None:
        for one in self._begun.values():
            if one.rollout.done():
                one.rollout.result()


class QueuedEngines(Engines, Protocol):
    """Engines on devices of their own."""

    @property
    def queue(self) -> RequestQueue: ...


class AsyncRolloutSource:
    """Begins the rollout of a step as soon as its weights are new enough, and trains on the rollouts in the order of
    their steps, so that short responses are not preferred. At most `max_age + 1` rollouts exist, whatever happens.

    With an age of 1, and not in flight, it is one-step-off training: the rollout of step k + 1 is generated while step
    k trains, and is a function of run, step and the weights one step back.
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
        """The run has taken `done` of its `steps`. `saved`: rollouts of the checkpoint. `stall_s`: the run ends after
        that time without a sign of life of the engines. `saves_begun`: whether `save` writes rollouts or only their
        prompts."""
        self._sampler, self._engines, self._staleness = sampler, engines, staleness
        self._stall_s, self._saves_begun = stall_s, saves_begun
        self._prefetcher = _RolloutPrefetcher(sampler, engines.queue, staleness, done, steps, saved)
        self._thread_loop = BackgroundLoop("rollouts", sampler.collector.generation.serving)
        self._validation: RolloutTask | None = None
        self._memory: dict[str, float] = {}
        self._idle_before = 0.0

    def take(self, step: int, show: Show) -> Rollout:
        rollout = self._wait(self._prefetcher.take(step), show)
        idle = self._engines.queue.idle_s
        rollout.engines_idle_s, self._idle_before = idle - self._idle_before, idle
        return rollout

    def finish_generation(self) -> dict[str, float]:
        return self._memory

    def wait_until_idle(self, show: Show) -> None:
        if not self._staleness.in_flight:
            self._wait(self._prefetcher.wait_until_idle(), show, restores=False)

    def publish(self, step: int) -> dict[str, float]:
        if self._prefetcher.requests is None:
            metrics, stopped = self._engines.refit(step), 0.0
            self._prefetcher.requests = self._thread_loop.start()
        else:
            began = time.perf_counter()
            self._run(self._prefetcher.pause())
            stopped = time.perf_counter() - began
            metrics = self._engines.refit(step)
        self._memory = self._engines.finish_generation()
        self._run(self._prefetcher.resume(step))
        return metrics | {"pause_s": stopped}

    def held_out(self, step: int, show: Show) -> Rollout:
        self.wait_until_idle(show)
        self._validation = self._sampler.held_out_task(step)
        try:
            return self._wait(self._prefetcher.gather(self._validation, step), show)
        finally:
            self._validation = None
            self._run(self._prefetcher.release())

    def save(self, folder: Path) -> Mapping[str, Any]:
        state, rollouts = self._run(self._prefetcher.snapshot())
        save_rollouts(rollouts if self._saves_begun else [], folder)
        return {**state, "ahead": list(chain.from_iterable(draw for one in rollouts for draw in one.draws))}

    def close(self) -> None:
        self._thread_loop.close()

    def _run[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._thread_loop.wait(coroutine, lambda: None)

    def _wait[Result](self, coroutine: Coroutine[Any, Any, Result], show: Show, restores: bool = True) -> Result:
        """Wait for the thread, as long as engines, environments or rewards finish something. Restart engines when none
        is left."""
        queue, seen, since = self._engines.queue, (-1, -1), time.monotonic()

        def look() -> None:
            nonlocal seen, since
            if restores and not queue.has_engines:
                self.publish(self._prefetcher.version)
            sampled = self._prefetcher.tasks()
            sampled = [self._validation, *sampled] if self._validation is not None else sampled
            now = (queue.steps, sum(one.answers for one in sampled))
            if now != seen:
                seen, since = now, time.monotonic()
                progressed()
            # With several rollouts, no one knows to which of them an engine's tokens belong.
            tokens = queue.unfinished_tokens if len(sampled) == 1 else 0
            waits = "; ".join([queue.describe(), *(one.progress(tokens) for one in sampled[:1])])
            note_state(waits)
            if time.monotonic() - since > self._stall_s:
                limit = f"{self._stall_s:g} s (cluster.phase_timeout_s)"
                raise WorkerError("rollouts", "generate", f"no engine worked for {limit}, and nothing else: {waits}")
            if sampled:
                others = f"; {len(sampled) - 1} more rollouts under way" if len(sampled) > 1 else ""
                show(sampled[0].progress(tokens) + others)

        return self._thread_loop.wait(coroutine, look)
