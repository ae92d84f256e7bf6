"""The progress of this process, for its heartbeat: the latest value of a few counts."""

_counts: dict[str, int] = {}


def note(**counts: int) -> None:
    """Set counts: `note(step=3, micro_batch=2)`."""
    _counts.update(counts)


def latest() -> dict[str, int]:
    return dict(_counts)
