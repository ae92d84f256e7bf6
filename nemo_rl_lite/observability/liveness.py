"""Time limits on the launcher's work, a watchdog that enforces them, and a worker's progress for its heartbeat.

For the limits on workers' calls see `cluster/calls.py`.
"""

import faulthandler
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import psutil

from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.system.obituary import exit_at_once

PERIOD_S = 0.5
# Seconds for the main thread to react before the watchdog ends the process.
GRACE_S = 10.0
_SIGNAL = signal.SIGUSR2
# Maximum wait of faulthandler.
_LONGEST_S = 10**7
_STANDARD_ERROR = 2


@dataclass
class Limit:
    """Work that may take `limit_s` seconds without progress."""

    what: str
    limit_s: float
    since: float
    state: str = ""
    """Description of what it waits for."""

    def seconds_left(self) -> float:
        return self.limit_s - (time.monotonic() - self.since)


# Only the innermost counts.
_limits: list[Limit] = []
_watchdog_runs = False


@contextmanager
def limited(what: str, limit_s: float | None) -> Iterator[None]:
    """Limit the block, in which the main thread does `what`, to `limit_s` seconds (None: no limit). The enclosing limit
    restarts after the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = Limit(what, math.inf if limit_s is None else limit_s, time.monotonic())
    _limits.append(own)
    _set_last_resort()
    try:
        yield
    finally:
        _limits.remove(own)
        progressed()


def progressed() -> None:
    """Restart the innermost limit: something that the main thread waits for has happened."""
    if _limits and threading.current_thread() is threading.main_thread():
        _limits[-1].since = time.monotonic()
    _set_last_resort()


def note_state(state: str) -> None:
    """Set the description of what the main thread waits for, for the error of the innermost limit."""
    if _limits and threading.current_thread() is threading.main_thread():
        _limits[-1].state = state


def _set_last_resort() -> None:
    """Let faulthandler, whose thread does not need the GIL, end this process some time after the innermost limit, in
    case the watchdog cannot."""
    if not _watchdog_runs:
        return
    faulthandler.cancel_dump_traceback_later()
    left = _limits[-1].seconds_left() if _limits else math.inf
    if left < _LONGEST_S:
        faulthandler.dump_traceback_later(max(left, 0) + 2 * GRACE_S + PERIOD_S, exit=True, file=_STANDARD_ERROR)


def exceeded() -> Limit | None:
    """Return the innermost limit if it is exceeded."""
    return _limits[-1] if _limits and _limits[-1].seconds_left() < 0 else None


@contextmanager
def watched(last_words: Callable[[WorkerError], None], lost: Callable[[], str] = str) -> Iterator[None]:
    """Raise WorkerError in the main thread, during the block, if a limit is exceeded or `lost` names a dead process.

    If the main thread does not react, call `last_words`, and end this process and its children. If C code holds the
    GIL, the process ends with a traceback on standard error.
    """
    global _watchdog_runs
    over, errors = threading.Event(), list[WorkerError]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if errors:
            raise errors[-1]

    def watch() -> None:
        while not over.wait(PERIOD_S):
            late, gone = exceeded(), lost()
            if late is None and not gone:
                continue
            errors.append(_error(late) if late else WorkerError(gone, "run", "its process died", lost=True))
            signal.pthread_kill(main, _SIGNAL)
            if not over.wait(GRACE_S) and (gone or exceeded() is late):
                last_words(errors[-1])
                for child in psutil.Process().children(recursive=True):
                    with suppress(psutil.Error):
                        child.kill()
                exit_at_once(WorkerError.exit_status)

    main = threading.main_thread().ident or 0
    previous = signal.signal(_SIGNAL, interrupt)
    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        _watchdog_runs = True
        _set_last_resort()
        yield
    except BaseException as raised:
        # Ray's calls replace the exception of a signal handler.
        if errors and raised is not errors[-1]:
            raise errors[-1] from None
        raise
    finally:
        _watchdog_runs = False
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        errors.clear()
        signal.signal(_SIGNAL, previous)


def _error(late: Limit) -> WorkerError:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    at = f"{stack[-1].filename}:{stack[-1].lineno} {stack[-1].name}" if stack else "an unknown place"
    state = f": {late.state}" if late.state else ""
    cause = f"not done within {late.limit_s:g} s{state}; it is at {at}"
    return WorkerError("launcher", late.what, cause, details="".join(traceback.format_list(stack)))


class BackgroundWork:
    """A thread that works in place of the main thread. Heartbeats show its stack, and its phase."""

    def __init__(self) -> None:
        global _background
        self.thread, self.phase, self.since = threading.get_ident(), "", time.time()
        _background = self

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        self.phase, self.since = phase, time.time()
        try:
            yield
        finally:
            self.phase, self.since = "", time.time()


_background: BackgroundWork | None = None


def background_work() -> BackgroundWork | None:
    return _background


_counts: dict[str, int] = {}


def note_progress(**counts: int) -> None:
    """Set counts of this process: `note_progress(step=3, micro_batch=2)`."""
    _counts.update(counts)


def latest_progress() -> dict[str, int]:
    return dict(_counts)
