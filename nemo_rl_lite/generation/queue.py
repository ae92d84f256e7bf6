"""The queue of requests over all engine replicas. It does not depend on Ray or on an engine."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, Protocol

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

_Message = Literal["send", "report", "pause", "resume"]


class Replica(Protocol):
    """An engine that works by itself, as the queue sees it."""

    load: EngineLoad
    """The load of the last report."""
    steps: int
    """Steps of the engine by the last report."""

    async def send(self, requests: Mapping[int, Request], aborted: Sequence[int]) -> None:
        """Hand over requests by number, and numbers to abort. Concurrent calls keep their order."""
        ...

    async def report(self) -> Mapping[int, Completion | RequestError]:
        """Wait a moment for results, and return them; return at once if the engine has no requests."""
        ...

    async def pause(self) -> None:
        """Return when the engine has stopped. It keeps its requests."""
        ...

    async def resume(self) -> None:
        """Let the engine continue."""
        ...


class RequestQueue:
    """Gives each request to the replica with the fewest unfinished ones, so long responses spread over replicas.

    A replica holds at most `capacity` requests, and fewer if they need more KV cache than it has (`Admission`). With
    `share` requests, it begins no further responses to train on. The others wait in the order of `Assignment`.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        capacity: int,
        on_loss: Callable[[int, WorkerError], None],
        restore: Callable[[], None],
        dead: Sequence[int] = (),
        first: int = 0,
        share: int | None = None,
    ):
        """Create a queue.

        Args:
            on_loss: is called when a replica's process dies, and may raise. The other replicas get its requests.
            restore: is called when no replica is left, and may replace them (see `replaced`). Until then requests wait.
            dead: replicas without an engine, until they are replaced.
            first: number of the first request; engines must have none of these numbers.
            share: see `Assignment`.
        """
        self._replicas, self._on_loss, self._restore = replicas, on_loss, restore
        self._numbers = itertools.count(first)
        self._assignment = Assignment(len(replicas), capacity, share=share)
        for replica in dead:
            self._assignment.lose(replica)
        # Messages in flight with their replicas, and those that have ended.
        self._running: dict[asyncio.Task[None], tuple[int, _Message]] = {}
        self._ended: deque[asyncio.Task[None]] = deque()
        self._paused, self._held_back = False, 0
        self._changed = asyncio.Event()
        self._replaced: deque[int] = deque()
        self._failure: Exception | None = None
        self.repeated = 0
        """Tokens of lost replicas' responses that are sampled again, as far as their last reports tell."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["RequestQueue"]:
        """Drive the replicas during the block; see `Generation.serving`."""
        self._changed = asyncio.Event()
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
        if self._failure is None:
            await self._forget()
        await asyncio.gather(*self._running, return_exceptions=True)
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
        conversation.so_far = asked.so_far
        try:
            return await asked.answer
        except asyncio.CancelledError:
            self._assignment.drop(asked)
            self._changed.set()
            raise
        finally:
            conversation.so_far = None

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
        alive = list(self._assignment.alive)
        pausing = [self._begin(replica, "pause", self._replicas[replica].pause()) for replica in alive]
        await asyncio.gather(*pausing, return_exceptions=True)
        self._collect()
        if self._failure is not None:
            raise self._failure

    def resume(self) -> None:
        self._paused = False
        self._adopt_replaced()
        for replica in self._assignment.alive:
            self._begin(replica, "resume", self._replicas[replica].resume())
        self._changed.set()

    @property
    def has_engines(self) -> bool:
        return bool(self._assignment.alive)

    @property
    def are_in_work(self) -> bool:
        return bool(self._running)

    @property
    def steps(self) -> int:
        """Return the steps of all engines, as a sign of life."""
        return sum(replica.steps for replica in self._replicas)

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

    @property
    def taken_over(self) -> int:
        """Return the total tokens of lost replicas' responses that other replicas continue."""
        return self._assignment.taken_over

    @property
    def waiting(self) -> int:
        """Return the tokens of lost replicas' responses that wait for another replica."""
        return self._assignment.waiting

    def describe(self) -> str:
        """Describe the requests of each engine, for an error about a stalled run."""
        return self._assignment.describe() + ("; the engines are paused" if self._paused else "")

    async def _drive(self) -> None:
        try:
            while self._failure is None:
                self._changed.clear()
                self._adopt_replaced()
                if not self._paused:
                    if not self._held_back:
                        self._assignment.assign()
                    self._exchange()
                self._assignment.time(self._paused)
                await self._changed.wait()
                self._collect()
        except Exception as error:  # reaches the episodes
            self._fail(error)

    def _exchange(self) -> None:
        """Send new requests, and collect the results of each replica that has requests."""
        in_flight = set(self._running.values())
        for replica in self._assignment.alive:
            held = self._assignment.held[replica]
            if held.has_news:
                self._begin(replica, "send", self._replicas[replica].send(*held.hand_over()))
            # Before the requests have arrived, the replica would report nothing.
            elif held.load and not {(replica, "send"), (replica, "report")} & in_flight:
                self._begin(replica, "report", self._report(replica))

    def _begin(self, replica: int, message: _Message, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._running[task] = replica, message
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._ended.append(task)
        self._changed.set()

    async def _report(self, replica: int) -> None:
        finished = await self._replicas[replica].report()
        for number, completion in finished.items():
            if isinstance(completion, Unfinished):
                self._assignment.held[replica].add_tokens(number, completion)
            elif isinstance(completion, RequestError):
                asked = self._assignment.refuse(replica, number)
                if asked is not None and not asked.answer.done():
                    asked.answer.set_exception(completion)
            else:
                asked = self._assignment.finish(replica, number, completion)
                if asked is not None and not asked.answer.done():
                    asked.answer.set_result((completion, replica))
        self._assignment.observe(replica, self._replicas[replica].load)

    def _collect(self) -> None:
        """Handle the errors of messages that have ended."""
        while self._ended:
            task = self._ended.popleft()
            # Otherwise the replica was lost before.
            if task not in self._running:
                continue
            replica, _ = self._running.pop(task)
            error = None if task.cancelled() else task.exception()
            try:
                if isinstance(error, WorkerError) and error.lost:
                    self._lose(replica, error)
                elif error is not None:
                    raise error
            except Exception as failure:
                self._fail(failure)

    def _fail(self, error: Exception) -> None:
        """End all work; the error reaches the episodes that wait or will ask."""
        self._failure = self._failure or error
        for task in self._running:
            task.cancel()
        self._running.clear()
        for asked in self._assignment.unanswered():
            if not asked.answer.done():
                asked.answer.set_exception(error)

    def _lose(self, replica: int, error: WorkerError) -> None:
        before = self.waiting
        self._assignment.lose(replica)
        sampled = self._replicas[replica].load.unfinished_tokens
        self.repeated += max(sampled - (self.waiting - before), 0)
        # A report of the loss has the tokens that wait.
        self._on_loss(replica, error)
        for task in [task for task, (of, _) in self._running.items() if of == replica]:
            del self._running[task]
            task.cancel()
        if not self._assignment.alive:
            self._restore()

    def replaced(self, replicas: Sequence[int]) -> None:
        """Note that new engines have replaced these. Another thread may call this while the engines are paused."""
        self._replaced.extend(replicas)

    def _adopt_replaced(self) -> None:
        while self._replaced:
            self._assignment.replace(self._replaced.popleft())

    async def _forget(self) -> None:
        """Abort unfinished requests."""
        left = {replica: self._assignment.held[replica].unfinished for replica in self._assignment.alive}
        for replica, unfinished in sorted(left.items()):
            if unfinished:
                self._begin(replica, "send", self._replicas[replica].send({}, unfinished))
        self._collect()
        while self._running and self._failure is None:
            self._changed.clear()
            await self._changed.wait()
            self._collect()
        if self._failure is not None:
            raise self._failure

    def _clear(self) -> None:
        self._assignment.clear()
        self._running.clear()
        self._ended.clear()
