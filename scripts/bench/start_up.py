"""Measure the seconds from the command to the first step, with every part: start_up.py [N] [-- OVERRIDE ...]

Runs the command N times (3), one after the other, for one step each, and writes a record with all parts that the runs
log. The first run is apart from the later ones, since it may find caches empty. Without overrides the run is the recipe
grpo-smollm2-135m-1n1g. `NRL_BENCH_OUT` names another folder for the record.
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record
from gpu_run import first_step_begins

DEFAULT = ("recipes=grpo-smollm2-135m-1n1g",)
ONE_STEP = ("algorithm.max_num_steps=1", "checkpoint.export_hf_at_end=false", "logger.plots=false")
WHOLE, SETUP = "command to first step", "timing/setup/"
TARGET_S = 35


def main() -> None:
    count, overrides = arguments(sys.argv[1:])
    runs = []
    for number in range(1, count + 1):
        runs.append(measure(overrides))
        print(f"run {number}: {runs[-1][WHOLE]:.1f} s to the first step", flush=True)
    groups = {"first run": runs[:1], "later runs": runs[1:]}
    results = []
    for when, own in groups.items():
        for part in dict.fromkeys(name for run in own for name in run):
            times = [run.get(part, 0.0) for run in own]
            results.append(record.result(f"{part}, {when}", when, "s", times))
            print(f"{when:<12}{part:<36}{statistics.median(times):8.2f} s")
    typical = statistics.median(run[WHOLE] for run in runs[1:] or runs)
    bars = [record.bar(f"{WHOLE}, s", typical, TARGET_S, at_least=False)]
    print(record.write("start-up", results, bars, f"Overrides: {shlex.join(overrides)}"))


def arguments(given: list[str]) -> tuple[int, list[str]]:
    """Return the number of runs and the overrides of their command."""
    place = given.index("--") if "--" in given else len(given)
    own, overrides = given[:place], given[place + 1 :]
    return int(own[0]) if own else 3, [*(overrides or DEFAULT), *ONE_STEP]


def measure(overrides: list[str]) -> dict[str, float]:
    """Run the command once; return the seconds of its parts, in the order of the log."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nemo_rl_lite.train", *overrides, f"hydra.run.dir={folder}/run"]
        started = time.time()
        done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{shlex.join(command)}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    first = first_step_begins(lines)
    if first is None:
        sys.exit("the run took no step")
    parts = {name: value for line in lines for name, value in line.items() if name.startswith(SETUP)}
    return {WHOLE: first - started, **parts}


if __name__ == "__main__":
    main()
