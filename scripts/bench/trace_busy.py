"""Print how long GPUs worked in each phase of a profiled step, and write it as a record:

    python scripts/bench/trace_busy.py TRACE [NAME]

TRACE is the folder of a profiled step (`profile.steps`), such as outputs/NAME/TIME/profile/step-00000003,
or one file in it. Times in which several kernels ran at once count once. The record is `busy-by-phase-NAME` (default:
the run's time and the step).
"""

import gzip
import json
import sys
import tempfile
from pathlib import Path

import record

from nemo_rl_lite.run.report.busy import PhaseBusy, busy_by_phase, traces_of


def main(arguments: list[str]) -> None:
    trace = Path(arguments[0]).resolve()
    step = trace if trace.is_dir() else trace.parent
    name = arguments[1] if len(arguments) > 1 else f"{step.parent.parent.name}-{step.name}"
    phases = busy_by_phase(traces_of(trace))
    if not phases:
        sys.exit(f"{trace}: no process has used a GPU")
    print("\n".join(lines(phases)))
    results = []
    for one in phases:
        results.append(record.result("seconds", one.phase, "s", [one.seconds]))
        for worker, busy in one.busy.items():
            results.append(record.result(f"GPU busy for {worker}", one.phase, "s", [busy]))
    print(record.write(f"busy-by-phase-{name}", results, [], "one profiled step, which takes longer than others"))


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
