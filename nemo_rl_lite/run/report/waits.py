"""Who waits for whom: what the policy and the engines did during the newest steps, from the files of their rollouts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_lite.observability.console import PHASES
from nemo_rl_lite.rollout.store import Times, read_spans, read_times, rollout_files, step_of

# The most steps that are drawn, and the parts of their time in which requests are counted.
STEPS, PARTS = 12, 300
# The newest files, of both splits, that are looked at. More than those of STEPS: see `waits`.
_FILES = 6 * STEPS
# Seconds of the shortest activity that is drawn.
_SHORTEST_S = 0.001
_WHOLE = "total_step_time"
# What the policy does, by the name of its timer. Of `generate`, the policy's part is to wait.
_ACTIVITIES = {timer: phase for phase, (timers, _) in PHASES.items() for timer in timers} | {
    "generation": "wait",
    "checkpointing": "checkpoint",
    "total_validation_time": "validate",
}

Interval = tuple[float, float]
Entry = Mapping[str, float | None]


@dataclass(frozen=True, eq=False)
class _Recorded:
    """One file of a rollout."""

    file: Path
    step: int
    split: str
    times: Times

    def phases(self, activity: str) -> list[Interval]:
        return [(begin, end) for name, begin, end in self.times.phases if _ACTIVITIES.get(name) == activity]

    @property
    def whole(self) -> Interval:
        """The whole step."""
        (found,) = [(begin, end) for name, begin, end in self.times.phases if name == _WHOLE]
        return found


def waits(folder: Path, metrics: Sequence[Entry], is_done: bool) -> dict[str, Any] | None:
    """Return what the policy and the engines did in the newest steps, in seconds since the first of them began: the
    `steps`; the `policy`'s activities; the `requests` of each rollout that the engines had in each of PARTS parts; when
    the engines were `paused` for new weights and `idle`; the `shares` of the time. None where the files do not tell: of
    earlier versions, or without a sample.

    The rollouts that a run has under way are on disk only later. So unless it `is_done`, the steps that ended after the
    newest rollout was begun are left out. Raises OSError or pyarrow.ArrowException: a file cannot be read.
    """
    files = list(_of_newest_process(folder, metrics))
    steps = _known(files, is_done)[-STEPS:]
    if not steps:
        return None
    # Validations before the first step and after the last one belong to no step.
    zero, end = steps[0].whole[0], steps[-1].whole[1]
    seconds, drawn = end - zero, [one for one in files if one.step >= steps[0].step]
    asked = {one: list(_generating(one, zero, end)) for one in drawn}
    requests = [{"step": one.step, "split": one.split, "counts": _counts(asked[one], seconds)} for one in drawn]
    waiting = [interval for one in steps for interval in one.phases("wait")]
    paused = _paused(steps, metrics, zero)
    idle = _gaps([*(interval for own in asked.values() for interval in own), *paused], seconds)
    sides = {"policy waits": waiting, "engines idle": idle, "engines paused": paused}
    return {
        "seconds": _rounded(seconds),
        "parts": PARTS,
        "steps": [[one.step, *(_rounded(at - zero) for at in one.whole)] for one in steps],
        "policy": [
            [_ACTIVITIES[name], _rounded(begin - zero), _rounded(until - zero), one.step]
            for one in drawn
            for name, begin, until in one.times.phases
            if name in _ACTIVITIES and begin >= zero and until <= end and until - begin >= _SHORTEST_S
        ],
        "requests": [one for one in requests if one["counts"][1]],
        "paused": [[_rounded(begin), _rounded(until)] for begin, until in paused],
        "idle": [[_rounded(begin), _rounded(until)] for begin, until in idle if until - begin >= _SHORTEST_S],
        "shares": {side: _rounded(sum(until - begin for begin, until in own) / seconds) for side, own in sides.items()},
    }


def _of_newest_process(folder: Path, metrics: Sequence[Entry]) -> Iterator[_Recorded]:
    """The files with times, of the process that took the newest steps: between two processes nothing is known."""
    starts = [entry["step"] for entry in metrics if "timing/setup/total" in entry]
    since = max((step for step in starts if step is not None), default=0)
    for file in rollout_files(folder)[-_FILES:]:
        if step_of(file) > since and (times := read_times(file)) is not None:
            yield _Recorded(file, step_of(file), file.stem.rpartition("-")[2], times)


def _known(files: Sequence[_Recorded], is_done: bool) -> list[_Recorded]:
    """The steps for which the files have all that the engines did."""
    steps = [one for one in files if one.split == "train" and one.times.phases]
    if is_done:
        return steps
    newest = max((one.times.began for one in steps if one.times.began is not None), default=0.0)
    return [one for one in steps if one.whole[1] <= newest]


def _paused(steps: Sequence[_Recorded], metrics: Sequence[Entry], zero: float) -> list[Interval]:
    """When the engines had stopped for new weights."""
    stopping = {entry["step"]: entry.get("refit/pause_s") or 0.0 for entry in metrics if "refit/seconds" in entry}
    refits = [(one.step, *interval) for one in steps for interval in one.phases("refit")]
    return [(begin + stopping.get(step, 0.0) - zero, end - zero) for step, begin, end in refits]


def _generating(one: _Recorded, zero: float, end: float) -> Iterator[Interval]:
    """When each request of a rollout was with the engines, as far as that lies between `zero` and `end`."""
    if one.times.began is None:
        return
    began = one.times.began - zero
    for span in read_spans(one.file):
        begin, until = max(began + span["begin"], 0.0), min(began + span["end"], end - zero)
        if span["what"] == "generate" and begin < until:
            yield begin, until


def _counts(spans: Sequence[Interval], seconds: float) -> tuple[int, list[float]]:
    """The first part in which there is a request, and the mean number of requests from there on."""
    begins, ends = np.array(spans).reshape(-1, 2).T
    edges = np.linspace(0, seconds, PARTS + 1)
    counts = np.diff(_elapsed(edges, begins) - _elapsed(edges, ends)) * PARTS / seconds
    (there,) = np.nonzero(counts > 0.005)
    if not len(there):
        return 0, []
    return int(there[0]), counts[there[0] : there[-1] + 1].round(2).tolist()


def _elapsed(edges: np.ndarray, since: np.ndarray) -> np.ndarray:
    """The seconds that have passed at each of `edges` since the times that lie before it, together."""
    times = np.sort(since)
    passed = np.searchsorted(times, edges)
    return passed * edges - np.concatenate(([0.0], np.cumsum(times)))[passed]


def _gaps(intervals: Iterable[Interval], seconds: float) -> list[Interval]:
    """The times between 0 and `seconds` that lie in none of the intervals."""
    found, covered = [], 0.0
    for begin, end in sorted([*intervals, (seconds, seconds)]):
        if begin > covered:
            found.append((covered, begin))
        covered = max(covered, end)
    return found


def _rounded(value: float) -> float:
    return round(value, 3)
