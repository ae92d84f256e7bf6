"""The tables of docs/metrics.md, checked against the metrics that a run has logged."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def undocumented(names: Iterable[str]) -> list[str]:
    """Of the names, those that no row has."""
    patterns = [re.compile(pattern) for pattern, _ in _rows()]
    return sorted(name for name in set(names) - {"step", "time"} if not any(one.fullmatch(name) for one in patterns))


def not_logged(names: Iterable[str], *kinds: str) -> list[str]:
    """Of the rows for one of these kinds of runs, the metrics that are not among the names."""
    there = set(names)
    return sorted(
        pattern
        for pattern, own in _rows()
        if own & set(kinds) and not any(re.fullmatch(pattern, name) for name in there)
    )


def documented() -> list[str]:
    """Return a pattern for each metric."""
    return [pattern for pattern, _ in _rows()]


def _rows() -> Iterator[tuple[str, set[str]]]:
    """Yield a pattern for each metric, and the kinds of runs that log it."""
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| `"):
            continue
        metrics, _, _, kinds = (cell.strip() for cell in line.strip("|").split("|"))
        names = re.findall(r"`([^`]+)`", metrics)
        for name in names:
            # `_min` and `/pct_1` stand for the first name with another ending.
            if name.startswith("_"):
                name = names[0] + name
            elif name.startswith("/"):
                name = names[0].rpartition("/")[0] + name
            yield (
                re.sub(r"<\w+>", "[^/]+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">")),
                set(kinds.split(", ")),
            )
