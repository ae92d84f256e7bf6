"""Seconds of a step over TRL's: of lines of speed_ablation.py and of trl_step.py, which ran on one machine.

trl_ratio.py {small|large} LINE ... [--folder FOLDER]

FOLDER has both records (default: docs/benchmarks).
"""

import argparse
import json
import shlex
import statistics
from pathlib import Path

import record

TARGETS = {"small": 0.45, "large": 0.36}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TARGETS)
    parser.add_argument("lines", nargs="+", metavar="LINE")
    parser.add_argument("--folder", type=Path, default=record.FOLDER)
    given = parser.parse_args()
    ours, trl = (_newest(given.folder, f"speed-{kind}-{given.task}-") for kind in ("ablation", "trl"))
    theirs = _steps(trl, f"TRL, {given.task}")
    results, bars = [record.result("whole step", f"TRL, {given.task}", "s", theirs)], []
    for line in given.lines:
        mine = _steps(ours, line)
        pairs = [statistics.median(mine) / one for one in theirs]
        results.append(record.result("whole step", line, "s", mine))
        results.append(record.result("our median over each of TRL's steps", line, "", pairs))
        ratio = statistics.median(mine) / statistics.median(theirs)
        bars.append(record.bar(f"step, ours over TRL, medians: {line}", ratio, TARGETS[given.task], False))
    origin = {name: ours[name] for name in ("date", "commit", "hardware", "versions")}
    command = shlex.join(["python", "scripts/bench/trl_ratio.py", given.task, *given.lines])
    notes = [f"{who}: {one['note']}" for who, one in (("ours", ours), ("TRL", trl)) if one.get("note")]
    origin |= {"command": command, "note": "; ".join(notes)}
    print(record.save(f"speed-over-trl-{given.task}", origin, results, bars), [bar["value"] for bar in bars])


def _newest(folder: Path, begins: str) -> dict:
    return max((json.loads(file.read_text()) for file in folder.glob(f"{begins}*.json")), key=lambda one: one["date"])


def _steps(measured: dict, config: str) -> list[float]:
    return next(one["reps"] for one in measured["results"] if (one["name"], one["config"]) == ("whole step", config))


if __name__ == "__main__":
    main()
