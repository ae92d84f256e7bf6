"""Ends a run whose launcher hangs: in an environment or a reward, in Ray, on a file system. Workers have other limits
(`calls.wait`)."""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.observability import limits

PERIOD_S = 0.5
# Seconds that the main thread has to react, before the process ends without it.
GRACE_S = 10.0
_SIGNAL = signal.SIGUSR2
# The longest time that faulthandler can wait, or longer than any run.
_LONGEST_S = 10**7
_STANDARD_ERROR = 2


@contextmanager
def watched(last_words: Callable[[WorkerError], None], lost: Callable[[], str] = str) -> Iterator[None]:
    """Within the block, raise WorkerError in the main thread when a limit is exceeded (`observability/limits.py`), or
    when `lost` names a process that the run cannot do without.

    Where the main thread does not react, call `last_words` and end this process and all that it has started. Where one
    long step of C code keeps Python from running at all, the process ends with a traceback on standard error.
    """
    over, errors = threading.Event(), list[WorkerError]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if errors:
            raise errors[-1]

    def watch() -> None:
        while not over.wait(PERIOD_S):
            late, gone = limits.exceeded(), lost()
            if late is None and not gone:
                continue
            errors.append(_error(late) if late else WorkerError(gone, "run", "its process died", lost=True))
            signal.pthread_kill(main, _SIGNAL)
            if not over.wait(GRACE_S) and (gone or limits.exceeded() is late):
                last_words(errors[-1])
                _end_at_once()

    main = threading.main_thread().ident or 0
    previous = signal.signal(_SIGNAL, interrupt)
    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        with limits.heard_by(_end_without_python):
            yield
    except BaseException as raised:
        # Ray's own calls raise something else instead of what a handler of a signal raises.
        if errors and raised is not errors[-1]:
            raise errors[-1] from None
        raise
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        errors.clear()
        signal.signal(_SIGNAL, previous)


def _end_without_python(left: float) -> None:
    """Let a thread of faulthandler, which needs no Python, end this process if nothing begins within `left` seconds and
    the time in which the watchdog would have ended it."""
    faulthandler.cancel_dump_traceback_later()
    if left < _LONGEST_S:
        faulthandler.dump_traceback_later(max(left, 0) + 2 * GRACE_S + PERIOD_S, exit=True, file=_STANDARD_ERROR)


def _error(late: limits.Limit) -> WorkerError:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    at = f"{stack[-1].filename}:{stack[-1].lineno} {stack[-1].name}" if stack else "an unknown place"
    cause = f"not done within {late.limit_s:g} s; it is at {at}"
    return WorkerError("launcher", late.what, cause, details="".join(traceback.format_list(stack)))


def _end_at_once() -> None:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    os._exit(WorkerError.exit_status)
