"""How far this process is, for whoever watches it from outside: a few counts, the latest of each."""

_counts: dict[str, int] = {}


def note(**counts: int) -> None:
    """`note(step=3, micro_batch=2)`."""
    _counts.update(counts)


def latest() -> dict[str, int]:
    return dict(_counts)
