"""Measures wall-clock seconds of named phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from nemo_rl_lite.observability.profiling import span


class Timer:
    """Adds up seconds by name within a step: `with timer("generation"): ...`, then `take()`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds by name since the last `take`."""
        taken, self._seconds = self._seconds, {}
        return taken


def seconds_since_command() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()
