"""Run one training on GPUs and keep it as JSON with its curves, phase times, memory, hardware and versions.

python scripts/bench/gpu_run.py NAME [override ...]     writes docs/benchmarks/runs/NAME.json

`NRL_BENCH_OUT` names another folder, `NRL_BENCH_COMMIT` the commit where the machine has no git. After
`NRL_BENCH_LIMIT_S` seconds the run is interrupted, and its steps so far are kept. `runs.py` makes the benchmark records
of these files.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import record

from nemo_rl_lite.rollout.store import read_rollout, rollout_files

GENERATED = ("reasoning_gym", "reverse_digits")
RUNS = record.FOLDER / "runs"


def main() -> None:
    name, *overrides = sys.argv[1:]
    target = Path(os.environ.get("NRL_BENCH_OUT", RUNS)) / f"{name}.json"
    folder = record.ROOT / "outputs" / "bench" / f"{name}-{os.getpid()}"
    arguments = ["-m", "nemo_rl_lite.train", *overrides]
    started = time.time()
    status = _run([sys.executable, *arguments, f"hydra.run.dir={folder}"])
    if status:
        for log in sorted(folder.glob("logs/*.log")):
            print(f"--- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n")
    seconds = time.time() - started
    if not (folder / "metrics.jsonl").exists():
        sys.exit(f"{name}: the run ended with status {status} before it had any metrics; see its output above")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = first_step_begins(lines)
    config = json.loads((folder / "config.json").read_text())
    kept = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": record.commit(),
        "command": f"python {shlex.join(arguments)}",
        "exit_status": status,
        "hardware": record.describe_hardware(),
        "versions": record.versions(record.PACKAGES),
        "config": config,
        "seconds": seconds,
        "seconds_to_first_step": first - started if first else None,
        "series": _series(lines),
        # Samples are kept for generated problems only: a dataset's rows may not be copied.
        "samples": _samples(folder) if config["data"]["name"] in GENERATED else [],
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(kept) + "\n")
    print(f"{name}: status {status}, {seconds:.0f} s, {kept['seconds_to_first_step'] or 0:.0f} s to the first step")
    sys.exit(status)


def _run(command: list[str]) -> int:
    """Run the command and return its exit status."""
    process, limit_s = subprocess.Popen(command, cwd=record.ROOT), os.environ.get("NRL_BENCH_LIMIT_S")
    try:
        return process.wait(float(limit_s) if limit_s else None)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.wait()


def first_step_begins(lines: list[dict[str, Any]]) -> float | None:
    """Return the time at which the first step began, in seconds since the epoch; None where no step ended."""
    steps = [line for line in lines if "timing/train/total_step_time" in line]
    return steps[0]["time"] - steps[0]["timing/train/total_step_time"] if steps else None


def _series(lines: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Return each metric's [step, value] pairs, with six digits."""
    series: dict[str, list[list[float]]] = {}
    for line in lines:
        for metric, value in line.items():
            if metric not in ("step", "time"):
                series.setdefault(metric, []).append([line["step"], float(f"{value:.6g}")])
    return series


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Return the first samples of the first and the last step."""
    files = [file for file in rollout_files(folder) if file.stem.endswith("train")]
    return [row for file in (*files[:1], *files[-1:]) for row in read_rollout(file)[:2]]


if __name__ == "__main__":
    main()
