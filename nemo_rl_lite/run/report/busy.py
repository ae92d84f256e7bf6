"""How busy GPUs were in each phase of a profiled step, from the traces of torch's profiler."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from nemo_rl_lite.observability.console import PHASES
from nemo_rl_lite.observability.profiling import DRIVER, SUFFIX

WHOLE = "whole step"
# The timers of a phase in the launcher's trace.
_TIMERS = {phase: timers for phase, (timers, _) in PHASES.items()} | {WHOLE: ("total_step_time",)}
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}

Interval = tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """One process' trace. Times are in seconds since the epoch, so that traces can be compared."""

    ranges: Sequence[tuple[str, Interval]]
    """Named ranges on the CPU, in the order of their beginnings."""
    busy: Sequence[Interval]
    """When its GPU computed or copied for it: in order, without overlaps."""


@dataclass(frozen=True)
class PhaseBusy:
    """Seconds of a phase, and of these the seconds in which GPUs worked, by process."""

    phase: str
    seconds: float
    busy: Mapping[str, float]

    def shares(self) -> dict[str, list[float]]:
        """The share of the phase in which the GPUs of each kind of process worked: mean, least, most."""
        kinds: dict[str, list[float]] = {}
        for worker, seconds in self.busy.items():
            kinds.setdefault(worker.rpartition("-")[0] or worker, []).append(seconds / self.seconds)
        return {kind: [mean(own), min(own), max(own)] for kind, own in kinds.items()}


# Raised by what is no whole trace.
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError)


def read_trace(file: Path) -> Trace:
    """Read a Chrome trace, gzipped if its name ends in .gz. Raises one of UNREADABLE."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        content = json.load(opened)
    if not isinstance(content, dict):
        raise ValueError("it is no trace of torch's profiler")
    base, ranges, busy = content.get("baseTimeNanoseconds", 0) / 1e9, [], []
    for event in content["traceEvents"]:
        if event.get("ph") != "X":
            continue
        kind = event.get("cat")
        if kind in _ON_GPU:
            busy.append(_interval(event, base))
        elif kind == "user_annotation":
            ranges.append((event["name"], _interval(event, base)))
    return Trace(sorted(ranges, key=lambda one: one[1]), union(busy))


def traces_of(path: Path) -> dict[str, Trace]:
    """The traces of a step's folder by process, or the one in a file, and that of the launcher in the same folder."""
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    launchers = path.parent / f"{DRIVER}{SUFFIX}"
    files += [] if path.is_dir() or path == launchers or not launchers.is_file() else [launchers]
    return {file.name.partition(".")[0]: read_trace(file) for file in files}


def busy_by_phase(traces: Mapping[str, Trace]) -> list[PhaseBusy]:
    """Each phase that the launcher has timed; without its trace, each outermost range of the one trace there is. Empty
    where no process used a GPU.

    Raises:
        ValueError: there are several traces, and none is the launcher's.
    """
    workers = {name: trace for name, trace in traces.items() if trace.busy}
    if not workers:
        return []
    if DRIVER in traces:
        phases = _timed(traces[DRIVER])
    elif len(traces) == 1:
        phases = _outermost(next(iter(traces.values())))
    else:
        raise ValueError(f"{DRIVER}{SUFFIX} is missing, which says when each phase was")
    found = []
    for phase, times in phases.items():
        busy = {name: _seconds(common(trace.busy, times)) for name, trace in workers.items()}
        found.append(PhaseBusy(phase, _seconds(times), busy))
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times in order, without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(some: Sequence[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    """The times that lie in both; each is in order and without overlaps."""
    place, other = 0, 0
    while place < len(some) and other < len(others):
        begin, end = max(some[place][0], others[other][0]), min(some[place][1], others[other][1])
        if begin < end:
            yield begin, end
        if some[place][1] < others[other][1]:
            place += 1
        else:
            other += 1


def _timed(driver: Trace) -> dict[str, list[Interval]]:
    found = {
        phase: union(times for name, times in driver.ranges if name in timers) for phase, timers in _TIMERS.items()
    }
    return {phase: times for phase, times in found.items() if times}


def _outermost(trace: Trace) -> dict[str, list[Interval]]:
    """The ranges by name that lie in no other one."""
    found: dict[str, list[Interval]] = {}
    until = float("-inf")
    for name, (begin, end) in trace.ranges:
        if begin >= until:
            found.setdefault(name, []).append((begin, end))
            until = end
    return found


def _interval(event: Mapping[str, Any], base: float) -> Interval:
    begin = base + event["ts"] / 1e6
    return begin, begin + event["dur"] / 1e6


def _seconds(times: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in times)
