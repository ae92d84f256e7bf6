"""What engines, environments and rewards did during one rollout, from the rollout's file."""

from collections.abc import Mapping, Sequence
from typing import Any

# The most episodes that are drawn, and the parts of the rollout's time in which work is counted.
EPISODES, PARTS = 256, 120


def timeline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the rollout's seconds; `lanes`, how much each engine, the environment and the reward had to do on average
    in each of PARTS parts of that time; and what each episode waited for, as [what, begin, end, engine]. None where the
    rows tell nothing: runs of earlier versions kept no times."""
    episodes = [row.get("spans") or [] for row in rows]
    spans = [span for episode in episodes for span in episode]
    seconds = max((span["end"] for span in spans), default=0.0)
    if seconds <= 0:
        return None
    lanes: dict[str, list[float]] = {}
    for span in sorted(spans, key=lambda span: (span["what"] != "generate", span["what"], span["place"])):
        counts = lanes.setdefault(_lane(span), [0.0] * PARTS)
        for part, share in _shares(span["begin"] / seconds * PARTS, span["end"] / seconds * PARTS):
            counts[part] += share
    stride = -(-len(episodes) // EPISODES)
    return {
        "step": rows[0]["step"],
        "seconds": round(seconds, 3),
        "count": len(episodes),
        "lanes": {name: [round(count, 2) for count in counts] for name, counts in lanes.items()},
        "episodes": [[_drawn(span) for span in episode] for episode in episodes[::stride]],
    }


def _lane(span: Mapping[str, Any]) -> str:
    return f"engine {span['place']}" if span["what"] == "generate" else span["what"]


def _shares(begin: float, end: float) -> list[tuple[int, float]]:
    """The parts that a time from `begin` to `end` lies in, counted in parts, and how much of each it takes."""
    parts = range(int(begin), min(int(end) + 1, PARTS))
    return [(part, min(end, part + 1) - max(begin, part)) for part in parts]


def _drawn(span: Mapping[str, Any]) -> list[Any]:
    return [span["what"], round(span["begin"], 3), round(span["end"], 3), span["place"]]
