"""The queue of requests over all engine replicas. It does not depend on Ray or on an engine."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.assignment import Assignment, PendingRequest
from nemo_rl_lite.generation.interface import (
    Completion,
    Conversation,
    EngineLoad,
    Progress,
    Request,
    RequestError,
    Unfinished,
)

# Exchanges in flight per replica: it starts one while it returns the results of another.
_EXCHANGES = 2


class Replica(Protocol):
    """An engine as the queue drives it."""

    load: EngineLoad
    """The load after the last step."""

    async def step(
        self, submitted: Mapping[int, Request], aborted: Sequence[int]
    ) -> dict[int, Completion | RequestError]:
        """Submit and abort requests, let the engine work for a moment, and return its results. Concurrent
        exchanges run in order."""
        ...


class RequestQueue:
    """Gives each request to the replica with the fewest unfinished ones, so long responses spread over replicas.

    A replica holds at most `capacity` requests, and fewer if they need more KV cache than it has (`Admission`). The
    others wait in the order of `Assignment`.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        capacity: int,
        on_loss: Callable[[int, WorkerError], None],
        restore: Callable[[], None],
    ):
        """`on_loss` is called when a replica's process dies, and may raise. The other replicas get its requests.
        `restore` is called when no replica is left, and may replace them (see `replaced`). Until then requests wait."""
        self._replicas, self._on_loss, self._restore = replicas, on_loss, restore
        self._numbers = itertools.count()
        self._assignment = Assignment(len(replicas), capacity)
        self._running: dict[asyncio.Task[dict[int, Completion | RequestError]], int] = {}
        self._paused, self._held_back = False, 0
        self._changed, self._quiet = asyncio.Event(), asyncio.Event()
        self._replaced: deque[int] = deque()
        self._failure: Exception | None = None
        self.steps = 0
        """Finished exchanges, as a sign of life."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["RequestQueue"]:
        """Drive the replicas during the block; see `Generation.serving`."""
        self._changed, self._quiet = asyncio.Event(), asyncio.Event()
        self._paused, self._held_back, self._failure = False, 0, None
        driver = asyncio.create_task(self._drive())
        try:
            yield self
        except BaseException:
            # Do not wait for engines: they may be the cause.
            for task in (driver, *self._running):
                task.cancel()
            self._clear()
            raise
        driver.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._failure is None:
            await self._forget()
        self._clear()

    async def sample(
        self, request: Request, conversation: Conversation | None = None, progress: Progress | None = None
    ) -> tuple[Completion, int]:
        """See `Requests.sample`.

        Raises:
            RequestError: the engine rejects the request.
            WorkerError: an engine failed, or died and may not be restarted.
            EngineError: an engine computes non-finite numbers.
        """
        if self._failure is not None:
            raise self._failure
        answer = asyncio.get_running_loop().create_future()
        conversation = conversation or Conversation(ended=True)
        request = conversation.begin_turn(request)
        asked = PendingRequest(next(self._numbers), request, answer, conversation, progress)
        self._assignment.add(asked)
        self._changed.set()
        try:
            return await asked.answer
        except asyncio.CancelledError:
            self._assignment.drop(asked)
            self._changed.set()
            raise

    @contextmanager
    def submit_as_batch(self) -> Iterator[None]:
        self._held_back += 1
        try:
            yield
        finally:
            self._held_back -= 1
            self._changed.set()

    async def pause(self) -> None:
        """Pause all engines until `resume`; return when all have stopped. They keep their requests, and more may be
        added. Raises as `sample` if the queue has failed."""
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
        return bool(self._assignment.alive)

    @property
    def are_in_work(self) -> bool:
        return bool(self._running)

    @property
    def unfinished_tokens(self) -> int:
        return sum(self._replicas[replica].load.unfinished_tokens for replica in self._assignment.alive)

    @property
    def idle_s(self) -> float:
        """Return the total seconds in which no engine had a request."""
        return self._assignment.idle.seconds

    @property
    def busy_s(self) -> float:
        """Return the total seconds in which an engine had requests and was not paused, summed over engines."""
        return sum(held.busy.seconds for held in self._assignment.held)

    def describe(self) -> str:
        """Describe the requests of each engine, for an error about a stalled run."""
        return self._assignment.describe() + ("; the engines are paused" if self._paused else "")

    async def _drive(self) -> None:
        try:
            while True:
                self._changed.clear()
                while self._replaced:
                    self._assignment.replace(self._replaced.popleft())
                if not self._paused:
                    if not self._held_back:
                        self._assignment.assign()
                    self._start()
                self._assignment.time(self._paused)
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait([changed, *self._running], return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._collect()
        except Exception as error:  # any error must reach the episodes that wait or will ask
            self._failure = error
            for task in self._running:
                task.cancel()
            self._running.clear()
            self._quiet.set()
            for asked in self._assignment.unanswered():
                if not asked.answer.done():
                    asked.answer.set_exception(error)

    def _start(self) -> None:
        in_flight = Counter(self._running.values())
        for replica in self._assignment.alive:
            held = self._assignment.held[replica]
            while in_flight[replica] < _EXCHANGES and (held.load or held.aborted):
                in_flight[replica] += 1
                step = asyncio.ensure_future(self._replicas[replica].step(*held.hand_over()))
                # One failure is raised; asyncio would print the others.
                step.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._running[step] = replica

    def _collect(self) -> None:
        for task in [task for task in self._running if task.done()]:
            replica = self._running.pop(task, None)
            if replica is None:
                # An earlier step has lost its replica.
                continue
            try:
                finished = task.result()
            except WorkerError as error:
                if not error.lost:
                    raise
                self._lose(replica, error)
                continue
            self.steps += 1
            for number, completion in finished.items():
                if isinstance(completion, Unfinished):
                    self._assignment.held[replica].tell(number, completion)
                elif isinstance(completion, RequestError):
                    asked = self._assignment.refuse(replica, number)
                    if asked is not None and not asked.answer.done():
                        asked.answer.set_exception(completion)
                else:
                    asked = self._assignment.finish(replica, number, completion)
                    if asked is not None and not asked.answer.done():
                        asked.answer.set_result((completion, replica))
            self._assignment.observe(replica, self._replicas[replica].load)
        if not self._running:
            self._quiet.set()

    def _lose(self, replica: int, error: WorkerError) -> None:
        self._on_loss(replica, error)
        self._assignment.lose(replica)
        for step in [task for task, of in self._running.items() if of == replica]:
            del self._running[step]
            step.cancel()
        if not self._assignment.alive:
            self._restore()

    def replaced(self, replicas: Sequence[int]) -> None:
        """Note that new engines have replaced these. Another thread may call this while the engines are paused."""
        self._replaced.extend(replicas)

    async def _forget(self) -> None:
        """Abort unfinished requests."""
        for replica in sorted(self._assignment.alive):
            try:
                if unfinished := self._assignment.held[replica].unfinished:
                    await self._replicas[replica].step({}, unfinished)
            except WorkerError as error:
                if not error.lost:
                    raise
                self._lose(replica, error)

    def _clear(self) -> None:
        self._assignment.clear()
        self._running.clear()
