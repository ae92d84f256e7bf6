"""Run the quickstart over several seeds: accuracy before and after, seconds, phase times, peak memory.

python scripts/bench/quickstart.py [seed ...]
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import record
from whole_runs import tiny_run

PATTERN = r"RESULT accuracy_before=(\S+) accuracy_after=(\S+) seconds=(\S+) steps=(\d+) run=(\S+)"
DEFAULT_SEEDS = (42, 1, 2)


def run(seed: int) -> dict:
    """Run one quickstart; return its RESULT line and its summary."""
    command = [sys.executable, "-m", "nemo_rl_lite.quickstart", f"algorithm.seed={seed}"]
    # The job includes the warm-up, whose model a user's cache or folder may have.
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_CACHE_HOME": folder, "PYTHONPATH": str(record.ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        print(done.stdout.splitlines()[-1], flush=True)
        return read(done.stdout.splitlines()[-1])


def read(line: str) -> dict:
    """Return what a RESULT line says, and the summary of its run."""
    before, after, seconds, steps, folder = re.fullmatch(PATTERN, line).groups()
    summary = json.loads((Path(folder) / "summary.json").read_text())
    return summary | {"before": float(before), "after": float(after), "seconds": float(seconds), "steps": int(steps)}


def main(arguments: list[str]) -> None:
    seeds = [int(argument) for argument in arguments] or list(DEFAULT_SEEDS)
    write(seeds, [run(seed) for seed in seeds])


def write(seeds: list[int], runs: list[dict]) -> None:
    config = f"seeds {', '.join(map(str, seeds))}"
    rises = [one["after"] - one["before"] for one in runs]
    results = [
        record.result("held-out accuracy before", config, "share", [one["before"] for one in runs]),
        record.result("held-out accuracy after", config, "share", [one["after"] for one in runs]),
        record.result("rise", config, "share", rises),
        record.result("end to end, with the warm-up", config, "s", [one["seconds"] for one in runs]),
        record.result("GRPO step (median of a run)", config, "s", [one["seconds_a_step"] for one in runs]),
    ]
    for phase in runs[0]["seconds_by_phase"]:
        times = [one["seconds_by_phase"][phase] for one in runs]
        results.append(record.result(f"{phase} (median of a run)", config, "s", times))
    for process in runs[0]["peak_memory_bytes"]:
        peaks = [one["peak_memory_bytes"][process] / 2**30 for one in runs]
        results.append(record.result(f"peak resident memory, {process}", config, "GiB", peaks))
    bars = [
        record.bar("smallest rise of held-out accuracy", min(rises), 0.3, at_least=True),
        record.bar("slowest run, s", max(one["seconds"] for one in runs), 120, at_least=False),
    ]
    path = record.write("quickstart", results, bars)
    print(f"wrote {path}; median {statistics.median(rises):.3f} rise")


def trial() -> None:
    """Make the record of a run of a few steps."""
    line = f"RESULT accuracy_before=0.1 accuracy_after=0.2 seconds=1.5 steps=8 run={tiny_run()}"
    write([42], [read(line)])


if __name__ == "__main__":
    record.start(main, trial)
