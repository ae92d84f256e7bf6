"""Calls a user's code in processes of its own, with a time limit that holds whatever the code does.

Code may hang inside C code (a huge power, a regular expression) or leave processes behind. So each process leads a
session of its own, adopts what its children leave, and is ended from here with all of them.
"""

import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import psutil

# A process may take this long, in seconds, to start and to import the user's code.
START_S = 60.0
# Seconds to wait for the processes to end.
_STOP_S = 30.0
# The number of starts in a row that may fail, as in a moment without memory.
_MOST_STARTS = 3
_LONGEST_ERROR = 300
# The folder of this package, which is not a user's code.
_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


class CallError(Exception):
    """A call has no result: the code raised (`details`: its traceback), was late, or its process ended."""

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


class LateError(CallError):
    """The time limit was exceeded."""


class StartError(CallError):
    """The processes do not start."""


def as_call_error(error: BaseException) -> CallError:
    """Describe a user's error in one short line: some quote a whole response."""
    text = f"{type(error).__name__}: {error}"
    short = text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."
    return CallError(short, "".join(traceback.format_exception(error)))


def place_of(error: BaseException) -> str:
    """Return the last line of the user's file in an error's traceback, as " (FILE, line N)"; "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_PACKAGE)]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


@dataclass(frozen=True)
class Target:
    """The object in each process: an instance of the class at the dotted `path`, made with `arguments`. `title` names a
    process and `limit` the time limit in messages."""

    path: str
    arguments: Mapping[str, Any]
    title: str
    limit: str


@dataclass(eq=False)
class Call:
    """A call of a method of the target, and the future of its result."""

    method: str
    arguments: tuple[Any, ...]
    session: int | None
    future: Future = field(default_factory=Future)

    def settle(self, value: Any) -> None:
        """Give the future its result, or the `CallError` that it has instead."""
        if self.future.done():
            return
        if isinstance(value, CallError):
            self.future.set_exception(value)
        else:
            self.future.set_result(value)


class CallPool:
    """At most `processes` processes with at most `at_once` calls each. The first starts now, the others when there is
    work; they live as long as the pool.

    Calls of one session reach the same process. With `at_once` = 1 plain code runs in its process' main thread;
    otherwise plain code runs in threads, and coroutines share the main thread.
    """

    def __init__(self, target: Target, processes: int, at_once: int, timeout_s: float | None):
        self._manager = _Manager(target, processes, at_once, timeout_s)
        weakref.finalize(self, self._manager.stop)
        threading.Thread(target=self._manager.run, name=f"calls of {target.title}", daemon=True).start()

    def submit(self, method: str, *arguments: Any, session: int | None = None) -> Future:
        """Call a method of the target. The future's exception is a `CallError` where there is no result."""
        call = Call(method, arguments, session)
        self._manager.post(call)
        return call.future

    def close(self, session: int) -> None:
        """End a session: its process calls the target's `close(session)`."""
        self._manager.post(session)


@dataclass(eq=False)
class _Process:
    """A process, its pipe, a descriptor that is readable after its end, and its calls. The process ends when this end
    of the pipe is closed, even by a crash."""

    process: subprocess.Popen
    pipe: Connection
    ended: int
    started: float
    is_ready: bool = False
    is_retired: bool = False
    """A late call may still run there. It takes no new calls, and ends after the others."""
    calls: dict[int, tuple[Call, float]] = field(default_factory=dict)
    """By number: the call, and when it is late."""
    sessions: set[int] = field(default_factory=set)

    @classmethod
    def start(cls, target: Target, at_once: int) -> "_Process":
        """Start a process that holds the target and takes `at_once` calls at a time. Raises OSError."""
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "nemo_rl_lite.system.pool_process", str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        with suppress(OSError):
            # The user's code may be in a folder that only this process has on its path.
            ours.send((sys.path, target.path, dict(target.arguments), at_once))
        return cls(process, ours, os.pidfd_open(process.pid), time.monotonic())

    @property
    def late_at(self) -> list[float]:
        """The times at which its calls, and its start, are late."""
        return [late for _, late in self.calls.values()] + ([] if self.is_ready else [self.started + START_S])

    def settle(self, number: int | None, value: Any) -> None:
        """Give a call its result, unless it was given up or nobody waits (None)."""
        call, _ = self.calls.pop(number, (None, 0.0)) if number is not None else (None, 0.0)
        if call is not None:
            call.settle(value)

    def end(self) -> None:
        """Kill the process and everything that it has started."""
        with suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            own.suspend()
            for one in [*own.children(recursive=True), own]:
                with suppress(psutil.Error):
                    one.kill()
        # What a process that ended by itself has left is still in its group.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()
        os.close(self.ended)


class _Manager:
    """The thread behind a pool. It has no reference to the pool, so that the pool can be collected."""

    def __init__(self, target: Target, processes: int, at_once: int, timeout_s: float | None):
        self._target, self._most, self._at_once = target, processes, at_once
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._lock, self._posted = threading.Lock(), list[Call | int]()
        self._awake, self._wake = Pipe(duplex=False)
        self._stopping, self._stopped = False, threading.Event()
        self._numbers = itertools.count()
        self._queue: list[Call] = []
        self._failed_starts = 0
        self._lost_sessions: set[int] = set()
        """Sessions whose process has ended."""
        self._processes = [_Process.start(self._target, self._at_once)]

    def post(self, item: Call | int) -> None:
        """Add a call, or the number of a session that ends."""
        with self._lock:
            self._posted.append(item)
        self._wake.send(None)

    def stop(self) -> None:
        """End all processes; returns when they have ended."""
        self._stopping = True
        self._wake.send(None)
        self._stopped.wait(_STOP_S)

    def run(self) -> None:
        while not self._stopping:
            self._take_posted()
            self._give_out()
            deadlines = [late for one in self._processes for late in one.late_at]
            left = min(deadlines, default=math.inf) - time.monotonic()
            ends = [*(one.pipe for one in self._processes), *(one.ended for one in self._processes)]
            wait([self._awake, *ends], None if left == math.inf else max(left, 0))
            while self._awake.poll():
                self._awake.recv()
            for process in list(self._processes):
                self._look_at(process)
        for process in self._processes:
            process.end()
        self._stopped.set()

    def _take_posted(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
        for item in posted:
            if isinstance(item, Call):
                self._queue.append(item)
                continue
            self._lost_sessions.discard(item)
            for process in self._processes:
                if item in process.sessions:
                    process.sessions.remove(item)
                    self._send(process, None, "close", (item,))

    def _give_out(self) -> None:
        """Send calls to the processes that have room for them, in their order; start processes where all are busy."""
        left = []
        for call in self._queue:
            if call.session in self._lost_sessions:
                call.settle(CallError(f"{self._target.title} has ended, and with it what this session had in it"))
                continue
            process = None if call.future.cancelled() else self._place(call)
            if process is None:
                left += [] if call.future.cancelled() else [call]
                continue
            if not call.future.set_running_or_notify_cancel():
                continue
            number = next(self._numbers)
            process.calls[number] = (call, time.monotonic() + self._timeout_s)
            if call.session is not None:
                process.sessions.add(call.session)
            self._send(process, number, call.method, call.arguments)
        self._queue = left
        starting = sum(not one.is_ready for one in self._processes)
        missing = min(self._most - len(self._processes), len(left) - starting * self._at_once)
        try:
            for _ in range(missing):
                self._processes.append(_Process.start(self._target, self._at_once))
        except OSError as error:
            self._give_up(f"{self._target.title} cannot be started: {error}")

    def _place(self, call: Call) -> _Process | None:
        """The process for a call: its session's, or else the least busy one; None if there is no room."""
        own = [one for one in self._processes if call.session is not None and call.session in one.sessions]
        able = own or [one for one in self._processes if one.is_ready and not one.is_retired]
        able = [one for one in able if len(one.calls) < self._at_once]
        return min(able, key=lambda one: (len(one.calls), len(one.sessions)), default=None)

    def _send(self, process: _Process, number: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            process.pipe.send((number, method, arguments))
        except OSError:
            # The process is dead; that will be seen.
            pass
        except Exception as error:  # a user's object may raise anything while it is pickled
            process.settle(number, as_call_error(error))

    def _look_at(self, process: _Process) -> None:
        """Take a process' results. Remove it if it has ended, starts too late, or is retired and idle."""
        with suppress(EOFError, OSError):
            while process.pipe.poll():
                said = process.pipe.recv()
                process.is_ready, self._failed_starts = True, 0
                if said is not None:
                    number, content = said
                    process.settle(number, _loaded(content))
        now, status = time.monotonic(), process.process.poll()
        for number, (call, late) in list(process.calls.items()):
            if late <= now:
                process.is_retired = True
                del process.calls[number]
                call.settle(LateError(f"no answer within {self._target.limit} = {self._timeout_s:g}"))
        starts_late = not process.is_ready and process.started + START_S <= now
        is_over = process.is_retired and not process.calls and not process.sessions
        if status is None and not starts_late and not is_over:
            return
        self._lost_sessions |= process.sessions
        for call, _ in process.calls.values():
            call.settle(CallError(f"{self._target.title} ended with status {status}"))
        self._processes.remove(process)
        process.end()
        if not process.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_STARTS:
                why = f"ended with status {status}" if status is not None else f"took longer than {START_S:g} s"
                self._give_up(f"the start of {self._target.title} {why}")

    def _give_up(self, why: str) -> None:
        """End all calls that wait for a process."""
        for call in self._queue:
            call.settle(StartError(why))
        self._queue.clear()


def _loaded(content: bytes) -> Any:
    try:
        return ForkingPickler.loads(content)
    except Exception as error:  # a user's object may raise anything
        return as_call_error(error)
