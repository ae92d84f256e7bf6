"""What the launcher's main thread is doing, and how long it may take. `cluster/watchdog.py` ends a run that exceeds a
limit."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Limit:
    """Something that may take `limit_s` seconds without a sign of progress."""

    what: str
    limit_s: float
    since: float

    def seconds_left(self) -> float:
        return self.limit_s - (time.monotonic() - self.since)


# The innermost is the one that counts.
_limits: list[Limit] = []
# Called with the seconds that are left, whenever the innermost begins or begins again.
_listeners: list[Callable[[float], None]] = []


@contextmanager
def heard_by(listener: Callable[[float], None]) -> Iterator[None]:
    """Within the block, call `listener` with the seconds that are left whenever a limit begins or begins again."""
    _listeners.append(listener)
    try:
        listener(seconds_left())
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def limited(what: str, limit_s: float | None) -> Iterator[None]:
    """Within the block the main thread does `what`, for at most `limit_s` seconds (None: without a limit). The limit
    around the block starts again after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = Limit(what, math.inf if limit_s is None else limit_s, time.monotonic())
    _limits.append(own)
    _tell()
    try:
        yield
    finally:
        _limits.remove(own)
        progressed()


def progressed() -> None:
    """Start the innermost limit again: something that the main thread waits for has happened."""
    if _limits and threading.current_thread() is threading.main_thread():
        _limits[-1].since = time.monotonic()
    _tell()


def _tell() -> None:
    for listener in _listeners:
        listener(seconds_left())


def seconds_left() -> float:
    """Seconds until the innermost limit is exceeded; infinite without one, negative where it is."""
    return _limits[-1].seconds_left() if _limits else math.inf


def exceeded() -> Limit | None:
    """The innermost limit, if it is exceeded."""
    return _limits[-1] if _limits and _limits[-1].seconds_left() < 0 else None
