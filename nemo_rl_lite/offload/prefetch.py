"""`Prefetch` decides when to begin bringing something back while the last micro-batches of a pass still run."""

import time
from collections.abc import Callable


class Prefetch:
    """Call this before each micro-batch. It calls `begin` each time from when the micro-batches that have not begun, at
    the pace so far, take about as long as the transfer, and before the last one at the latest. It takes no memory
    earlier."""

    def __init__(self, transfer_s: float, begin: Callable[[], None]):
        self._transfer_s, self._begin = transfer_s, begin
        self._first: tuple[float, int] | None = None

    def __call__(self, remaining: int, running: int = 0) -> None:
        """Call `begin` if it is time. `remaining` counts the micro-batches that have not begun, the next one included,
        and `running` those that have and may still run: the transfer waits for them, because it takes memory that they
        may use."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now, remaining
        began, count = self._first
        done = count - remaining - running
        seconds_left = remaining * (now - began) / done if done > 0 else float("inf")
        if remaining == 1 or seconds_left <= self._transfer_s:
            self._begin()
