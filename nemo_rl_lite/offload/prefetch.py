"""When to begin bringing something back while the last micro-batches of a pass still run."""

import time
from collections.abc import Callable


class Prefetch:
    """Called before each micro-batch; calls `begin` when the micro-batches that are left take about as long as the
    transfer, at the pace so far, and from then on, and before the last one in any case. Memory is taken no earlier."""

    def __init__(self, transfer_s: float, begin: Callable[[], None]):
        self._transfer_s, self._begin = transfer_s, begin
        self._first: tuple[float, int] | None = None

    def __call__(self, remaining: int) -> None:
        """`remaining` micro-batches have not run, the one about to begin included."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now, remaining
        if remaining == 1 or self._seconds_left(now, remaining) <= self._transfer_s:
            self._begin()

    def _seconds_left(self, now: float, remaining: int) -> float:
        started, count = self._first or (now, remaining)
        done = count - remaining
        return remaining * (now - started) / done if done else float("inf")
