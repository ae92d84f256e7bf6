"""Seconds of the quickstart's GRPO step on two and on four cores, idle and beside a process that keeps a core busy:

    python scripts/bench/busy.py [--cores 2 4] [--repeats 3] [--before CHECKOUT] [-- OVERRIDE ...]

A run and the busy process share the cores. `--before` is a checkout of an earlier commit, which is measured in turn
with this one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import record
from whole_runs import STEPS_ALONE

STEPS, WARM_UP = 8, 2
TARGET_BUSY, TARGET_CORES = 1.5, 1.0
COMMAND = ["-m", "nemo_rl_lite.train", f"algorithm.max_num_steps={STEPS}", *STEPS_ALONE]
TIMERS = {"step": "total_step_time", "generate": "generation", "train": "policy_training"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=[min(2, len(os.sched_getaffinity(0)))])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    checkouts = {"now": record.ROOT} | ({"before": given.before.resolve()} if given.before else {})
    cases = [(cores, busy) for cores in given.cores for busy in (False, True)]
    measured: dict[tuple[str, int, bool], list[dict[str, float]]] = {}
    for _ in range(given.repeats):
        for cores, busy in cases:
            for name, checkout in checkouts.items():
                one = step_seconds(checkout, cores, busy, given.overrides)
                measured.setdefault((name, cores, busy), []).append(one)
                print(name, cores, "busy" if busy else "idle", one, flush=True)
    results = [
        record.result(what, f"{name}, {cores} cores, {'one of them busy' if busy else 'idle'}", "s", times)
        for (name, cores, busy), runs in measured.items()
        for what in TIMERS
        if (times := [run[what] for run in runs])
    ]

    def typical(cores: int, busy: bool) -> float:
        return statistics.median(run["step"] for run in measured["now", cores, busy])

    bars = [
        record.bar(
            f"ratio of step times, busy to idle, {cores} cores",
            typical(cores, True) / typical(cores, False),
            TARGET_BUSY,
            at_least=False,
        )
        for cores in given.cores
    ]
    fewest, most = min(given.cores), max(given.cores)
    if most > fewest:
        ratio = typical(most, False) / typical(fewest, False)
        bars.append(record.bar(f"ratio of step times, {most} to {fewest} cores", ratio, TARGET_CORES, at_least=False))
    print(f"wrote {record.write('busy', results, bars)}")


def step_seconds(checkout: Path, cores: int, busy: bool, overrides: list[str]) -> dict[str, float]:
    """Return the medians over the steps of one run."""
    first = sorted(os.sched_getaffinity(0))[:cores]
    pinned = ["taskset", "-c", ",".join(map(str, first))]
    other = subprocess.Popen([*pinned, sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [*pinned, sys.executable, *COMMAND, *overrides, f"hydra.run.dir={folder}/run"]
            environment = os.environ | {"PYTHONPATH": f"{checkout}:{os.environ.get('PYTHONPATH', '')}"}
            subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
            rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    finally:
        if other is not None:
            other.kill()
            other.wait()
    return {
        what: statistics.median([row[name] for row in rows if (name := f"timing/train/{timer}") in row][WARM_UP:])
        for what, timer in TIMERS.items()
    }


if __name__ == "__main__":
    main()
