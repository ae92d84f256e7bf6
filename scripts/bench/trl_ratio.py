"""Seconds of a step over TRL's: of a line of speed_ablation.py and of trl_step.py, which ran in one lease.

trl_ratio.py {small|large} LINE [FOLDER]

FOLDER has both records (default: docs/benchmarks).
"""

import json
import statistics
import sys
from pathlib import Path

import record

TARGETS = {"small": 0.45, "large": 0.36}


def main() -> None:
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in TARGETS:
        sys.exit(__doc__)
    task, line = sys.argv[1:3]
    folder = Path(sys.argv[3]) if len(sys.argv) == 4 else record.FOLDER
    ours, trl = (_newest(folder, f"speed-{kind}-{task}-") for kind in ("ablation", "trl"))
    mine, theirs = _steps(ours, line), _steps(trl, f"TRL, {task}")
    origin = {name: ours[name] for name in ("date", "commit", "hardware", "versions")}
    origin |= {"command": f"python scripts/bench/trl_ratio.py {task} '{line}'", "note": trl["note"]}
    pairs = [statistics.median(mine) / one for one in theirs]
    results = [
        record.result("whole step", line, "s", mine),
        record.result("whole step", f"TRL, {task}", "s", theirs),
        record.result("our median over each of TRL's steps", line, "", pairs),
    ]
    ratio = statistics.median(mine) / statistics.median(theirs)
    bars = [record.bar("step, ours over TRL, medians", ratio, TARGETS[task], False)]
    print(record.save(f"speed-over-trl-{task}", origin, results, bars), ratio)


def _newest(folder: Path, begins: str) -> dict:
    return max((json.loads(file.read_text()) for file in folder.glob(f"{begins}*.json")), key=lambda one: one["date"])


def _steps(measured: dict, config: str) -> list[float]:
    return next(one["reps"] for one in measured["results"] if (one["name"], one["config"]) == ("whole step", config))


if __name__ == "__main__":
    main()
