"""Print how long GPUs worked in each phase of a profiled step, and write it as a record:

    python scripts/bench/trace_busy.py STEP [NAME]

STEP is the folder of a profiled step (`profile.steps`), such as outputs/NAME/TIME/profile/step-00000003. Times in which
several kernels ran at once count once. The record is `busy-by-phase-NAME` (default: the run's time and the step).
"""

import gzip
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record

from nemo_rl_lite.observability.console import PHASES
from nemo_rl_lite.observability.profiling import DRIVER, SUFFIX

# The timers of a phase in the launcher's trace.
TIMERS = {phase: timers for phase, (timers, _) in PHASES.items()} | {"step time": ("total_step_time",)}
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
Interval = tuple[float, float]


@dataclass(frozen=True)
class PhaseBusy:
    """Seconds of a phase, and of these the seconds in which GPUs worked, by process."""

    phase: str
    seconds: float
    busy: Mapping[str, float]


def main(arguments: list[str]) -> None:
    step = Path(arguments[0]).resolve()
    name = arguments[1] if len(arguments) > 1 else f"{step.parent.parent.name}-{step.name}"
    phases = busy_by_phase(step)
    if not phases:
        sys.exit(f"{step}: no process has used a GPU")
    print("\n".join(lines(phases)))
    results = []
    for one in phases:
        results.append(record.result("seconds", one.phase, "s", [one.seconds]))
        for worker, busy in one.busy.items():
            results.append(record.result(f"GPU busy for {worker}", one.phase, "s", [busy]))
    print(record.write(f"busy-by-phase-{name}", results, [], "one profiled step, which takes longer than others"))


def busy_by_phase(step: Path) -> list[PhaseBusy]:
    """Return each phase that the launcher has timed; nothing where no process used a GPU."""
    traces = {file.name.partition(".")[0]: read_trace(file) for file in sorted(step.glob(f"*{SUFFIX}"))}
    workers = {name: busy for name, (_, busy) in traces.items() if busy}
    if not workers:
        return []
    found = []
    for phase, timers in TIMERS.items():
        times = union(interval for name, interval in traces[DRIVER][0] if name in timers)
        if times:
            busy = {name: seconds(common(own, times)) for name, own in workers.items()}
            found.append(PhaseBusy(phase, seconds(times), busy))
    return found


def read_trace(file: Path) -> tuple[list[tuple[str, Interval]], list[Interval]]:
    """Return a process' named ranges on the CPU, and when its GPU computed or copied for it: seconds since the epoch,
    so that traces can be compared."""
    with gzip.open(file) as opened:
        content: dict[str, Any] = json.load(opened)
    base, ranges, busy = content.get("baseTimeNanoseconds", 0) / 1e9, [], []
    for event in content["traceEvents"]:
        if event.get("ph") != "X":
            continue
        begin = base + event["ts"] / 1e6
        if event.get("cat") in ON_GPU:
            busy.append((begin, begin + event["dur"] / 1e6))
        elif event.get("cat") == "user_annotation":
            ranges.append((event["name"], (begin, begin + event["dur"] / 1e6)))
    return ranges, union(busy)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times in order, without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(some: Sequence[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the times that lie in both; each is in order and without overlaps."""
    place, other = 0, 0
    while place < len(some) and other < len(others):
        begin, end = max(some[place][0], others[other][0]), min(some[place][1], others[other][1])
        if begin < end:
            yield begin, end
        if some[place][1] < others[other][1]:
            place += 1
        else:
            other += 1


def seconds(times: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in times)


def lines(phases: list[PhaseBusy]) -> list[str]:
    """A table: the seconds of each phase, and of each worker the share of them in which its GPU worked for it."""
    workers = list(phases[0].busy)
    rows = [["phase", "s", *workers]]
    for one in phases:
        shares = [f"{one.busy[worker] / one.seconds:.1%}" for worker in workers]
        rows.append([one.phase, f"{one.seconds:.3f}", *shares])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def trial() -> None:
    """Read a trace of one kernel in one phase."""
    with tempfile.TemporaryDirectory() as folder:
        step = Path(folder) / "run" / "profile" / "step-00000003"
        step.mkdir(parents=True)
        for name, category, begins, lasts in (("driver", "user_annotation", 0, 4e6), ("policy-0", "kernel", 1e6, 2e6)):
            event = {"ph": "X", "cat": category, "name": "policy_training", "ts": begins, "dur": lasts}
            with gzip.open(step / f"{name}.json.gz", "wt") as opened:
                json.dump({"baseTimeNanoseconds": 0, "traceEvents": [event]}, opened)
        main([str(step)])


if __name__ == "__main__":
    record.start(main, trial)
