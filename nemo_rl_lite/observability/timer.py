"""Measures wall-clock seconds of named phases."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_lite.observability.profiling import span

# The Unix time at which `time.perf_counter()` was 0.
_UNIX_ZERO = time.time() - time.perf_counter()


@dataclass(frozen=True)
class Phase:
    """One time that a named phase took, in seconds of `time.perf_counter()`."""

    name: str
    begin: float
    end: float


class Timer:
    """Adds up seconds by name within a step: `with timer("generation"): ...`, then `take()`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.phases: list[Phase] = []
        """Every phase since the timer was made, in the order of their ends."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            ended = time.perf_counter()
            self.add(name, ended - started)
            self.phases.append(Phase(name, started, ended))

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by name since the last `take`."""
        taken, self._seconds = self._seconds, {}
        return taken


def unix_time(at: float) -> float:
    """Return the Unix time, in seconds, of a time of `time.perf_counter()` in this process."""
    return at + _UNIX_ZERO


SETUP = Timer()
"""Times the parts of a worker process' start; `WorkerActor.start` takes them."""


def seconds_since_start() -> float:
    """Seconds since this process was started, which Linux notes in hundredths of a second after the machine's start.
    The Unix time of that is known to the second only."""
    # The name of the program, in parentheses, may have spaces.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
