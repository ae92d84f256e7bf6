"""Search in ordered values."""

from collections.abc import Callable


def last_that(holds: Callable[[int], bool], end: int) -> int | None:
    """Return the largest number of 0..end for which the monotone `holds` is true; None if it is false for 0."""
    if not holds(0):
        return None
    low, high = 0, end
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
