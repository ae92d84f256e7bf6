"""Call user code in separate processes, with a time limit that always holds.

User code may hang inside C code (a huge power, a regular expression) or leave processes behind. So each process has its
own session, adopts orphans of its children, and is killed with all of them. Nothing here blocks on a process: one that
does not read or write loses only its own calls.
"""

import asyncio
import itertools
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil

from nemo_rl_lite.errors import DataError
from nemo_rl_lite.system.user_errors import CallError, as_call_error

# Seconds for a process to start and to import the user's code.
START_S = 60.0
# Seconds for a late coroutine to clean up after its cancellation.
CANCEL_S = 5.0
# Seconds to wait for the processes to end.
_STOP_S = 30.0
# Seconds to wait for a killed process, which may hang in a file system.
_KILL_S = 1.0
_LONGEST_WAIT_S = 3600.0
# Number of kills of a process that keeps forking.
_KILLS = 50
# Bytes per read, and consecutive reads.
_CHUNK, _CHUNKS = 2**18, 64
# Consecutive failed starts before the pool gives up.
_MOST_STARTS = 3


class CallTimeout(CallError):
    """The time limit was exceeded."""


class StartError(CallError):
    """The processes do not start."""


@dataclass(frozen=True)
class PoolTarget:
    """The object in each process: an instance of the class at the dotted `path` with `arguments`. Messages call a
    process `title`, the time limit `limit` and the configured code `source`."""

    path: str
    arguments: Mapping[str, Any]
    title: str
    limit: str
    source: str = "user code"


@dataclass(eq=False)
class PoolCall:
    """A call of a method of the target, and the future of its result."""

    method: str
    arguments: tuple[Any, ...]
    session: int | None
    future: Future = field(default_factory=Future)

    def resolve(self, value: Any) -> None:
        """Set the future's result, or its `CallError`."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if isinstance(value, CallError):
            self.future.set_exception(value)
        else:
            self.future.set_result(value)


_pools: "weakref.WeakSet[CallPool]" = weakref.WeakSet()


@contextmanager
def ending_pools() -> Iterator[None]:
    """End the block's pools after it. An error's traceback would keep them alive."""
    before = set(_pools)
    try:
        yield
    finally:
        for pool in set(_pools) - before:
            pool.end()


def running_calls() -> int:
    """Return the number of calls in processes of all pools, also of those whose callers no longer wait."""
    return sum(pool.running_calls for pool in list(_pools))


class CallPool:
    """At most `processes` processes with at most `at_once` concurrent calls each. The first starts immediately, the
    others on demand; they live as long as the pool. With several concurrent calls, a late coroutine is cancelled.

    Calls of a session reach the same process. With `at_once` = 1, plain code runs in the process' main thread.
    Otherwise it runs in threads, and coroutines share the main thread.
    """

    def __init__(self, target: PoolTarget, processes: int, at_once: int, timeout_s: float | None):
        self._source, self._manager = target.source, _Manager(target, processes, at_once, timeout_s)
        self.end = weakref.finalize(self, self._manager.stop)
        """Ends all processes, once."""
        _pools.add(self)
        threading.Thread(target=self._manager.run, name=f"calls of {target.title}", daemon=True).start()

    def submit(self, method: str, *arguments: Any, session: int | None = None) -> Future:
        """Call a method of the target. Without a result, the future's exception is a `CallError`."""
        call = PoolCall(method, arguments, session)
        self._manager.post(call)
        return call.future

    async def call(self, method: str, *arguments: Any, session: int | None = None) -> Any:
        """Call a method of the target, and return its result.

        Raises:
            CallError: it raises or exceeds the time limit, or its process ends.
            DataError: the processes do not start.
        """
        try:
            return await asyncio.wrap_future(self.submit(method, *arguments, session=session))
        except StartError as error:
            raise DataError(f"{self._source}: {error}") from error

    @property
    def running_calls(self) -> int:
        """Number of calls in the processes."""
        return self._manager.running_calls

    def close(self, session: int) -> None:
        """End a session: its process calls the target's `close(session)`."""
        self._manager.post(session)


class _Channel:
    """Messages to and from a `multiprocessing.connection.Connection` in another process. No method blocks."""

    def __init__(self, own: socket.socket):
        own.setblocking(False)
        self._socket, self._in, self._out = own, bytearray(), deque[memoryview]()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_behind(self) -> bool:
        """True if `flush` has something to write."""
        return bool(self._out)

    def send(self, message: Any) -> None:
        """Write a message as far as possible. Pickling a user's object may raise anything."""
        content = memoryview(ForkingPickler.dumps(message))
        length = len(content)
        self._out += [memoryview(struct.pack("!i", length) if length < 2**31 else struct.pack("!iQ", -1, length))]
        self._out.append(content)
        self.flush()

    def flush(self) -> None:
        """Write as much as possible. The manager detects the end of the process."""
        with suppress(OSError):
            while self._out:
                written = self._socket.send(self._out[0])
                self._out[0] = self._out[0][written:]
                if not self._out[0]:
                    self._out.popleft()

    def receive(self) -> Iterator[Any]:
        """Yield the complete messages that have arrived."""
        with suppress(OSError):
            # Bounded, because a process may write faster than this one reads.
            for _ in range(_CHUNKS):
                if not (read := self._socket.recv(_CHUNK)):
                    break
                self._in += read
        while len(self._in) >= 4:
            (length,), start = struct.unpack_from("!i", self._in), 4
            if length < 0:
                # Missing bytes count as ones, so that the length is not too short.
                (length,), start = struct.unpack("!Q", self._in[4:12].ljust(8, b"\xff")), 12
            if len(self._in) < start + length:
                return
            content = bytes(memoryview(self._in)[start : start + length])
            del self._in[: start + length]
            yield ForkingPickler.loads(content)

    def close(self) -> None:
        self._socket.close()


@dataclass(eq=False)
class _Placed:
    """A call in its process: its deadline, whether the process has taken it, and whether it starts a session."""

    call: PoolCall
    begins: bool
    late: float = math.inf
    is_taken: bool = False


@dataclass(eq=False)
class _Process:
    """A process, its channel, a descriptor that is readable after its end, and its calls. The process ends if this end
    of the channel is closed, even by a crash."""

    process: subprocess.Popen
    channel: _Channel
    ended: int
    hangs_at: float
    """Time at which it counts as hanging unless it takes a message."""
    untaken: deque[int | None] = field(default_factory=lambda: deque([None]))
    """Messages that it has not taken: numbers of calls, or None. The first message is the target."""
    is_ready: bool = False
    late: dict[int, float] = field(default_factory=dict)
    """Late calls that may still run in it, by number, and the time until which they may clean up."""
    calls: dict[int, _Placed] = field(default_factory=dict)
    """By number."""
    waiting: deque[PoolCall] = field(default_factory=deque)
    """Calls that wait for a slot."""
    sessions: set[int] = field(default_factory=set)

    @classmethod
    def start(cls, target: PoolTarget, at_once: int) -> "_Process":
        """Start a process with the target and `at_once` concurrent calls. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "nemo_rl_lite.system.pool_process", str(theirs.fileno())]
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        channel = _Channel(ours)
        # The user's code may be in a folder on this process' path.
        channel.send((sys.path, target.path, dict(target.arguments), at_once))
        return cls(process, channel, os.pidfd_open(process.pid), time.monotonic() + START_S)

    @property
    def is_retired(self) -> bool:
        """True while a late call may run in it. It takes no new sessions, and ends after the others."""
        return bool(self.late)

    @property
    def ends_at(self) -> float:
        """Time at which it ends because of its late calls."""
        is_needed = not self.late or self.calls or self.sessions
        return math.inf if is_needed else max(self.late.values())

    @property
    def late_at(self) -> float:
        """The earliest deadline of the process and its calls."""
        return min([self.hangs_at, self.ends_at, *(placed.late for placed in self.calls.values())])

    def send(self, number: int | None, method: str, arguments: tuple[Any, ...], limit_s: float) -> None:
        """Send a call, which it must take within `limit_s` seconds. A pickling error is the call's error."""
        try:
            self.channel.send((number, method, arguments))
        except Exception as error:  # a user's object may raise anything while it is pickled
            self.resolve(number, as_call_error(error))
            return
        if not self.untaken:
            self.hangs_at = time.monotonic() + limit_s
        self.untaken.append(number)

    def take(self, limit_s: float) -> None:
        """Note that it has taken its next message, a call with a time limit of `limit_s` seconds."""
        self.is_ready, late = True, time.monotonic() + limit_s
        number = self.untaken.popleft()
        if number in self.calls:
            self.calls[number].is_taken, self.calls[number].late = True, late
        self.hangs_at = late if self.untaken else math.inf

    def cancel(self, number: int) -> None:
        """Cancel a late call, which has some seconds to clean up."""
        self.late[number] = time.monotonic() + CANCEL_S
        self.channel.send((number, None, ()))

    def resolve(self, number: int | None, value: Any) -> None:
        """Set the result of a call, unless it was given up or is None."""
        placed = self.calls.pop(number, None) if number is not None else None
        if placed is not None:
            placed.call.resolve(value)

    def end(self) -> None:
        """Kill the process and its descendants."""
        with suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            own.suspend()
            kill_descendants(own)
            own.kill()
        # Orphans of a process that ended by itself are still in its group.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILL_S)
        self.channel.close()
        os.close(self.ended)


def kill_descendants(process: psutil.Process) -> None:
    """Kill the descendants of a process that adopts orphans."""
    killed = set[psutil.Process]()
    for _ in range(_KILLS):
        with suppress(psutil.Error):
            found = set(process.children(recursive=True)) - killed
            if not found:
                return
            for one in found:
                with suppress(psutil.Error):
                    one.kill()
            killed |= found


class _Manager:
    """The thread of a pool. It has no reference to the pool, so the pool can be garbage-collected."""

    def __init__(self, target: PoolTarget, processes: int, at_once: int, timeout_s: float | None):
        self._target, self._most, self._at_once = target, processes, at_once
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._lock, self._posted = threading.Lock(), list[PoolCall | int]()
        self._awake, self._wake = socket.socketpair()
        self._awake.setblocking(False)
        self._wake.setblocking(False)
        self._stopping, self._stopped = False, threading.Event()
        self._numbers = itertools.count()
        self._queue = deque[PoolCall]()
        """Calls without a process."""
        self._failed_starts = 0
        self._lost_sessions: set[int] = set()
        """Sessions whose process has ended."""
        self._processes = [_Process.start(self._target, self._at_once)]

    def post(self, item: PoolCall | int) -> None:
        """Add a call, or the number of an ended session."""
        with self._lock:
            self._posted.append(item)
        self._wake_up()

    def stop(self) -> None:
        """End all processes, and wait for that."""
        self._stopping = True
        self._wake_up()
        self._stopped.wait(_STOP_S)

    @property
    def running_calls(self) -> int:
        # Another thread asks.
        return sum(len(one.calls) for one in list(self._processes))

    def _wake_up(self) -> None:
        # A full buffer wakes the thread, too.
        with suppress(BlockingIOError):
            self._wake.send(b".")

    def run(self) -> None:
        while not self._stopping:
            self._take_posted()
            self._give_out()
            self._start_missing()
            self._wait()
            for process in list(self._processes):
                self._look_at(process)
        for process in self._processes:
            process.end()
        self._stopped.set()

    def _wait(self) -> None:
        """Wait for a process, a post, or the next deadline."""
        news = select.poll()
        news.register(self._awake, select.POLLIN)
        for one in self._processes:
            news.register(one.channel, select.POLLIN | (select.POLLOUT if one.channel.is_behind else 0))
            news.register(one.ended, select.POLLIN)
        left = min((one.late_at for one in self._processes), default=math.inf) - time.monotonic()
        news.poll(math.ceil(min(max(left, 0), _LONGEST_WAIT_S) * 1000))
        with suppress(BlockingIOError):
            self._awake.recv(_CHUNK)

    def _take_posted(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
        for item in posted:
            if isinstance(item, PoolCall):
                home = self._home(item.session)
                (home.waiting if home else self._queue).append(item)
                continue
            self._lost_sessions.discard(item)
            if process := self._home(item):
                process.sessions.remove(item)
                process.send(None, "close", (item,), self._timeout_s)

    def _home(self, session: int | None) -> _Process | None:
        return next((one for one in self._processes if session in one.sessions), None)

    def _give_out(self) -> None:
        """Assign calls in order: to the session's process, or else to the least busy one with a free slot."""
        for process in self._processes:
            self._fill(process)
        while self._queue:
            session = self._queue[0].session
            if session in self._lost_sessions:
                lost = f"{self._target.title} has ended, and with it what this session had in it"
                self._queue.popleft().resolve(CallError(lost))
                continue
            able = [one for one in self._processes if one.is_ready and not one.is_retired and self._has_room(one)]
            process = self._home(session) or min(
                able, key=lambda one: (len(one.calls), len(one.sessions)), default=None
            )
            if process is None:
                return
            process.waiting.append(self._queue.popleft())
            self._fill(process)

    def _has_room(self, process: _Process) -> bool:
        return not process.untaken and not process.waiting and len(process.calls) < self._at_once

    def _fill(self, process: _Process) -> None:
        """Send a process its next waiting call, after it has taken the previous one."""
        while process.waiting and not process.untaken and len(process.calls) < self._at_once:
            call = process.waiting.popleft()
            if call.future.cancelled():
                continue
            number, begins = next(self._numbers), call.session not in process.sessions
            process.calls[number] = _Placed(call, begins)
            if call.session is not None:
                process.sessions.add(call.session)
            process.send(number, call.method, call.arguments, self._timeout_s)

    def _start_missing(self) -> None:
        """Start processes for calls beyond the current capacity."""
        able = [one for one in self._processes if not one.is_retired]
        room = sum(self._at_once - len(one.calls) - len(one.waiting) for one in able)
        missing = min(self._most - len(self._processes), len(self._queue) - room)
        try:
            for _ in range(missing):
                self._processes.append(_Process.start(self._target, self._at_once))
        except OSError as error:
            self._give_up(f"{self._target.title} cannot be started: {error}")

    def _look_at(self, process: _Process) -> None:
        """Take a process' results. Remove it if it has ended, hangs, or is retired and idle."""
        status, is_readable = process.process.poll(), self._listen(process)
        now = time.monotonic()
        for number, placed in list(process.calls.items()):
            if placed.late <= now:
                if self._at_once > 1:
                    process.cancel(number)
                else:
                    process.late[number] = now
                process.resolve(number, CallTimeout(f"no answer within {self._limit}"))
        title = self._target.title if process.is_ready else f"the start of {self._target.title}"
        if status is not None:
            self._end(process, f"{title} ended with status {status}")
        elif not is_readable:
            self._end(process, f"{title} wrote invalid data to its pipe")
        elif process.hangs_at <= now:
            limit = f"took no call within {self._limit}" if process.is_ready else f"took longer than {START_S:g} s"
            self._end(process, f"{title} {limit}")
        elif process.ends_at <= now:
            self._end(process, "")

    def _listen(self, process: _Process) -> bool:
        """Take a process' messages. Return False if user code has written to its pipe."""
        process.channel.flush()
        try:
            for said in process.channel.receive():
                if said is None:
                    process.take(self._timeout_s)
                    self._failed_starts = 0
                    continue
                number, content = said
                if content is None:
                    # A thread, which cannot be cancelled.
                    process.late |= {number: 0.0} if number in process.late else {}
                    continue
                process.late.pop(number, None)
                process.resolve(number, _loaded(content))
        except Exception:  # not a pickle, or not a message
            return False
        return True

    @property
    def _limit(self) -> str:
        return f"{self._target.limit} = {self._timeout_s:g}"

    def _end(self, process: _Process, why: str) -> None:
        """End a process and its calls. Calls that it has not taken because of another call go to other processes."""
        is_others_fault = process.is_retired or any(placed.is_taken for placed in process.calls.values())
        for placed in process.calls.values():
            if is_others_fault and placed.begins and not placed.is_taken:
                process.sessions.discard(placed.call.session)
                self._queue.appendleft(placed.call)
            else:
                placed.call.resolve(CallError(why))
        for call in process.waiting:
            call.resolve(CallError(why))
        self._lost_sessions |= process.sessions
        self._processes.remove(process)
        process.end()
        if not process.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_STARTS:
                self._give_up(why)

    def _give_up(self, why: str) -> None:
        for call in self._queue:
            call.resolve(StartError(why))
        self._queue.clear()


def _loaded(content: bytes) -> Any:
    try:
        return ForkingPickler.loads(content)
    except Exception as error:  # a user's object may raise anything
        return as_call_error(error)
