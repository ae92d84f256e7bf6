"""One queue of requests over all engine replicas. It knows neither Ray nor an engine."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.assignment import Assignment
from nemo_rl_lite.generation.held_requests import Asked
from nemo_rl_lite.generation.interface import Completion, Request

# Exchanges that a replica has at a time: it begins the second while the first one's results are still on their way.
_EXCHANGES = 2


class Replica(Protocol):
    """An engine as the queue drives it."""

    async def exchange(self, submitted: Mapping[int, Request], aborted: Sequence[int]) -> dict[int, Completion]:
        """Give the engine requests, take some back, let it work for a moment; return what has finished. Exchanges that
        begin before earlier ones have ended follow them in order."""
        ...


class RequestQueue:
    """Gives each request to the replica with the fewest unfinished ones.

    The samples of a prompt, asked for one after the other, so spread over all replicas, and none gets the long answers
    alone. A replica holds at most `capacity` requests; the rest wait here for the first that has room, in the order of
    their steps, and within a step in the order in which they were asked for.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        capacity: int,
        on_loss: Callable[[int, WorkerError], None],
        restore: Callable[[], None],
    ):
        """When a replica's process dies, the queue calls `on_loss`, which may raise, and gives its unfinished requests
        to the others; when none is left, it calls `restore`, which may bring them back with their weights (see
        `replaced`). Until it has engines again, requests wait."""
        self._replicas, self._on_loss, self._restore = replicas, on_loss, restore
        self._numbers = itertools.count()
        self._assignment = Assignment(len(replicas), capacity)
        self._running: dict[asyncio.Task[dict[int, Completion]], int] = {}
        self._paused, self._held_back = False, 0
        self._changed, self._quiet = asyncio.Event(), asyncio.Event()
        self._replaced: deque[int] = deque()
        self._failure: Exception | None = None
        self.exchanges = 0
        """Exchanges that have ended: a sign of life."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["RequestQueue"]:
        """Drive the replicas within the block; see `Generation.serving`."""
        self._changed, self._quiet = asyncio.Event(), asyncio.Event()
        self._paused, self._held_back, self._failure = False, 0, None
        driver = asyncio.create_task(self._drive())
        try:
            yield self
        except BaseException:
            # The engines may be what fails, so nothing waits for them.
            for task in (driver, *self._running):
                task.cancel()
            self._clear()
            raise
        driver.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._failure is None:
            await self._forget()
        self._clear()

    async def sample(self, request: Request, near: int | None = None) -> tuple[Completion, int]:
        """See `Requests.sample`.

        Raises:
            WorkerError: an engine failed, or died and may not be restarted.
            EngineError: an engine computes what are not numbers.
        """
        if self._failure is not None:
            raise self._failure
        asked = Asked(next(self._numbers), request, asyncio.get_running_loop().create_future(), near)
        self._assignment.add(asked)
        self._changed.set()
        try:
            return await asked.answer
        except asyncio.CancelledError:
            self._assignment.drop(asked)
            self._changed.set()
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Requests.together`."""
        self._held_back += 1
        try:
            yield
        finally:
            self._held_back -= 1
            self._changed.set()

    async def pause(self) -> None:
        """Let no engine work until `resume`; they keep their requests, and more may be added. Returns when all have
        stopped. Raises what `sample` raises, where the queue has failed."""
        self._paused = True
        while self._running:
            self._quiet.clear()
            await self._quiet.wait()
        if self._failure is not None:
            raise self._failure

    def resume(self) -> None:
        self._paused = False
        self._changed.set()

    @property
    def has_engines(self) -> bool:
        """Whether an engine is left."""
        return bool(self._assignment.alive)

    @property
    def idle_s(self) -> float:
        """Seconds so far in which no engine had a request."""
        return self._assignment.idle_s

    @property
    def busy_s(self) -> float:
        """Seconds so far in which an engine had requests and was not paused, summed over the engines."""
        return self._assignment.busy_s

    def describe(self) -> str:
        """Say who waits for whom, for a person who wonders why nothing happens."""
        return self._assignment.describe() + ("; the engines are paused" if self._paused else "")

    async def _drive(self) -> None:
        try:
            while True:
                self._changed.clear()
                self._take_back()
                if not self._paused:
                    if not self._held_back:
                        self._assignment.assign()
                    self._start()
                self._assignment.time(self._paused)
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait([changed, *self._running], return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._collect()
        except Exception as error:  # of any kind: every episode that waits, or will ask, must know
            self._failure = error
            for task in self._running:
                task.cancel()
            self._running.clear()
            self._quiet.set()
            for asked in self._assignment.unanswered():
                if not asked.answer.done():
                    asked.answer.set_exception(error)

    def _start(self) -> None:
        under_way = Counter(self._running.values())
        for replica in self._assignment.alive:
            held = self._assignment.held[replica]
            while under_way[replica] < _EXCHANGES and held.has_work:
                under_way[replica] += 1
                exchange = asyncio.ensure_future(self._replicas[replica].exchange(*held.tell()))
                # Of several that fail, one is raised; asyncio would print the others.
                exchange.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._running[exchange] = replica

    def _collect(self) -> None:
        for task in [task for task in self._running if task.done()]:
            replica = self._running.pop(task, None)
            if replica is None:
                # It belonged to a replica that an exchange before it has lost.
                continue
            try:
                finished = task.result()
            except WorkerError as error:
                if not error.lost:
                    raise
                self._lose(replica, error)
                continue
            self.exchanges += 1
            for number, completion in finished.items():
                asked = self._assignment.held[replica].finish(number)
                if asked is not None and not asked.answer.done():
                    asked.answer.set_result((completion, replica))
        if not self._running:
            self._quiet.set()

    def _lose(self, replica: int, error: WorkerError) -> None:
        """Let the others do what a dead replica has not finished."""
        self._on_loss(replica, error)
        self._assignment.lose(replica)
        for exchange in [task for task, of in self._running.items() if of == replica]:
            del self._running[exchange]
            exchange.cancel()
        if not self._assignment.alive:
            self._restore()

    def replaced(self, replicas: Sequence[int]) -> None:
        """New engines, which know no request, are in the places of these. May be called by another thread, while the
        engines are paused."""
        self._replaced.extend(replicas)

    def _take_back(self) -> None:
        while self._replaced:
            self._assignment.replace(self._replaced.popleft())

    async def _forget(self) -> None:
        """Take back what engines have not finished."""
        for replica in sorted(self._assignment.alive):
            try:
                if unfinished := self._assignment.held[replica].unfinished:
                    await self._replicas[replica].exchange({}, unfinished)
            except WorkerError as error:
                if not error.lost:
                    raise
                self._lose(replica, error)

    def _clear(self) -> None:
        self._assignment.clear()
        self._running.clear()
