"""An engine that works by itself: its loop in a thread, and the messages of other threads to it."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_lite.generation.interface import (
    Completion,
    Decoded,
    Engine,
    EngineLoad,
    EngineReport,
    Request,
    RequestError,
    Unfinished,
)
from nemo_rl_lite.observability.liveness import BackgroundWork
from nemo_rl_lite.observability.profiling import span

# Seconds that a report waits for news, and the least time between two reports with news.
REPORT_S, _PERIOD_S = 0.2, 0.02
# Seconds between two reports of the tokens of all responses. A lost engine costs at most the tokens of this time.
TOKENS_S = 5.0


@dataclass(frozen=True)
class _Message:
    """Work for the engine's thread between two steps. `span`: its name in traces."""

    work: Callable[[], Any]
    span: str
    done: Future[Any]


class _ClosedError(Exception):
    """The loop was closed."""


class EngineLoop:
    """Makes an engine and steps it, in its own thread, while it has requests and is not paused.

    `send` brings requests, and `report` collects results. A late report does not delay the engine. Every other call is
    a message that the thread handles between two steps. Requests keep their order.
    """

    def __init__(self, make: Callable[[], Engine]):
        """Raises what `make` raises."""
        self._changed = threading.Condition()
        self._messages: deque[_Message] = deque()
        # Numbers of unfinished requests, and of those that stream.
        self._open: set[int] = set()
        self._streams: set[int] = set()
        self._finished: dict[int, Completion | RequestError] = {}
        self._new_tokens: dict[int, Unfinished] = {}
        self._told_all = time.monotonic()
        self._load, self._steps, self._stepping_s, self._longest_s = EngineLoad(), 0, 0.0, 0.0
        self._step_began: float | None = None
        self._is_paused, self._reported = False, 0.0
        self._failure: BaseException | None = None
        self.engine: Engine
        """The engine. Only its thread may use it."""
        made: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make, made), name="engine", daemon=True)
        self._thread.start()
        made.result()

    def send(self, requests: Mapping[int, Request], aborted: Sequence[int] = ()) -> None:
        """Hand over requests by unique number, and numbers to abort. Returns at once. An error of the engine ends the
        loop: the next report raises it."""

        def work() -> None:
            try:
                # An engine without weights takes no requests, but those of a lost client may be aborted.
                if requests:
                    self.engine.submit(requests)
                self.engine.abort(aborted)
            except BaseException as error:
                self._fail(error)
                raise

        with self._changed:
            self._open |= requests.keys()
            self._streams |= {number for number, request in requests.items() if request.streams}
            self._forget(aborted)
            self._post(work, "submit")

    def clear(self) -> None:
        """Abort all requests."""
        with self._changed:
            unfinished = sorted({*self._open, *self._finished})
        self.send({}, unfinished)

    def report(self, seconds: float = REPORT_S) -> EngineReport:
        """Wait for results, at most for `seconds`, and not at all without requests; return them. Raises what has ended
        the loop."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news or not self._open, seconds)
            # Collect the results of several steps.
            early = self._reported + _PERIOD_S - time.monotonic()
            self._changed.wait_for(lambda: self._failure is not None or not self._open, max(early, 0.0))
            if self._failure is not None:
                raise self._failure
            self._reported = time.monotonic()
            finished, self._finished = {**self._new_tokens, **self._finished}, {}
            self._new_tokens = {}
            stuck_s = 0.0 if self._step_began is None else time.monotonic() - self._step_began
            load, self._load = self._load, replace(self._load, preempted=0)
            longest_s, self._longest_s = self._longest_s, 0.0
            return EngineReport(finished, load, self._steps, stuck_s, longest_s)

    def pause(self) -> int:
        """Stop after the present step, and return the number of steps so far. Requests stay."""

        def work() -> int:
            self._is_paused = True
            return self._steps

        return self._post(work, "pause").result()

    def resume(self) -> None:
        """Step again."""

        def work() -> None:
            self._is_paused = False

        self._post(work, "resume").result()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine between two steps; return its result, or raise its error."""
        name = "refit" if method == "receive_weights" else method
        return self._post(lambda: getattr(self.engine, method)(*arguments), name).result()

    def take_decoded(self) -> Decoded:
        """Return the engine's work since the last call, with the time of its steps."""

        def work() -> Decoded:
            seconds, self._stepping_s = self._stepping_s, 0.0
            return replace(self.engine.take_decoded(), seconds=seconds)

        return self._post(work, "take_decoded").result()

    def run_in_thread(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the engine's thread between two steps; return its result, or raise its error."""
        return self._post(work, "call").result()

    def close(self) -> None:
        """End the thread, and drop the engine."""
        with suppress(_ClosedError):
            self._post(self._close, "close").result()
        self._thread.join()
        del self.engine

    def _close(self) -> None:
        raise _ClosedError

    @property
    def _has_news(self) -> bool:
        return bool(self._finished or self._new_tokens or self._failure)

    def _post(self, work: Callable[[], Any], name: str) -> Future[Any]:
        message = _Message(work, name, Future())
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._messages.append(message)
            self._changed.notify_all()
        return message.done

    def _run(self, make: Callable[[], Engine], made: Future[None]) -> None:
        activity = BackgroundWork()
        try:
            self.engine = make()
        except BaseException as error:  # raised by the constructor
            made.set_exception(error)
            return
        made.set_result(None)
        try:
            while True:
                self._wait_for_work()
                with activity.doing("generate"):
                    while self._handle_messages() or self._has_steps():
                        if self._has_steps():
                            self._step()
        except BaseException as error:  # raised by the next report or call
            self._fail(error)

    def _wait_for_work(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._has_steps())

    def _has_steps(self) -> bool:
        return bool(self._open) and not self._is_paused

    def _handle_messages(self) -> bool:
        """Do what other threads ask for; return whether there was anything."""
        handled = False
        while self._messages:
            message, handled = self._messages.popleft(), True
            try:
                with span(message.span):
                    message.done.set_result(message.work())
            except BaseException as error:  # raised in the asking thread
                message.done.set_exception(error)
                if isinstance(error, _ClosedError):
                    raise
            if self._failure is not None:
                raise self._failure
        return handled

    def _step(self) -> None:
        began = self._step_began = time.monotonic()
        with span("generate"):
            finished = self.engine.step()
        load, ended = self.engine.load(), time.monotonic()
        new, of_all = dict[int, Unfinished](), ended > self._told_all + TOKENS_S
        # Another report would not be read before.
        if of_all or (self._streams and ended > self._reported + _PERIOD_S):
            new = self.engine.new_tokens(of_all)
            self._told_all = ended if of_all else self._told_all
        with self._changed:
            self._steps, self._stepping_s, self._step_began = self._steps + 1, self._stepping_s + ended - began, None
            self._longest_s = max(self._longest_s, ended - began)
            self._load = replace(load, preempted=self._load.preempted + load.preempted)
            # A request may have been aborted meanwhile.
            for number in self._open & new.keys():
                before = self._new_tokens.get(number)
                self._new_tokens[number] = new[number] if before is None else Unfinished.joined([before, new[number]])
            for number in self._open & finished.keys():
                self._finished[number] = finished[number]
                self._new_tokens.pop(number, None)
            self._open -= finished.keys()
            self._streams -= finished.keys()
            if self._has_news or not self._open:
                self._changed.notify_all()

    def _forget(self, numbers: Sequence[int]) -> None:
        """Drop the results of aborted requests."""
        self._open -= set(numbers)
        self._streams -= set(numbers)
        for number in numbers:
            self._finished.pop(number, None)
            self._new_tokens.pop(number, None)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            for message in self._messages:
                message.done.set_exception(error)
            self._messages.clear()
            self._changed.notify_all()


class LocalReplica:
    """A `Replica` over an engine of this process."""

    def __init__(self, make: Callable[[], Engine]):
        self.loop = EngineLoop(make)
        self.load, self.steps = EngineLoad(), 0
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="report")

    async def send(self, requests: Mapping[int, Request], aborted: Sequence[int]) -> None:
        self.loop.send(requests, aborted)

    async def report(self) -> Mapping[int, Completion | RequestError]:
        report = await asyncio.get_running_loop().run_in_executor(self._waiting, self.loop.report)
        self.load, self.steps = report.load, report.steps
        return report.finished

    async def pause(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.loop.pause)

    async def resume(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.loop.resume)
