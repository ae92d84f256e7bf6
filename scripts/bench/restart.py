"""Measure how a run recovers from a lost policy rank: restart.py [REPETITIONS]

SIGKILL hits one of four policy ranks on CPUs after a checkpoint. Seconds are from the kill to the end of the next step.
The parts of the restart are those of the run's metrics, in the slowest rank. The weights at the end must be bitwise
identical to those of an undisturbed run, and all other processes must be the same.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import record
import torch
from safetensors.torch import load_file
from whole_runs import KNOWN_MODEL

from nemo_rl_lite.validation.compose import compose_config

RANKS, STEPS, KILLED_AFTER = 4, 8, 4
SETTINGS = [
    *(f"algorithm.max_num_steps={STEPS}", "algorithm.num_prompts_per_step=8", "policy.train_global_batch_size=64"),
    *("policy.train_micro_batch_size=16", "policy.logprob_batch_size=16", f"cluster.cpu_ranks={RANKS}"),
    *("algorithm.val_period=0", "algorithm.val_at_start=false", "algorithm.val_at_end=false", "logger.plots=false"),
    *("generation=transformers", "generation.colocated.enabled=false", "generation.data_parallel_size=2"),
    *("checkpoint.save_period=1", "checkpoint.async_save=false"),
]
# Parts of a restart, and their metrics below `timing/setup/`.
PARTS = {"process start": "policy/process", "imports": "policy/import", "model build": "policy/build", "load": "resume"}
LOST, RECOVERED = "lost rank noticed", "from the kill to the next step's end"
WORKERS = [*(f"policy-{rank}" for rank in range(RANKS)), "generation-0", "generation-1"]


def main(arguments: list[str]) -> None:
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "alone"
        run(alone, None)
        for repetition in range(int(arguments[0]) if arguments else 3):
            hit, victim = Path(folder) / f"hit-{repetition}", repetition % RANKS
            for name, seconds in run(hit, victim).items():
                found[name].append(seconds)
            check(hit, alone, victim)
    results = [record.result(name, f"one of {RANKS} ranks killed", "s", reps) for name, reps in found.items()]
    print(record.write("restart", results, []))


def run(folder: Path, victim: int | None) -> dict[str, float]:
    """Train in a folder and kill a policy rank. Return the recovery times in seconds, by name."""
    command = [sys.executable, "-m", "nemo_rl_lite.train", f"hydra.run.dir={folder}", *SETTINGS]
    process = subprocess.Popen(command, cwd=record.ROOT, stdout=subprocess.PIPE, text=True)
    killed_at, found = None, dict[str, float]()
    for line in process.stdout or ():
        now = time.monotonic()
        if killed_at is not None and "the engines keep running" in line:
            found[LOST] = now - killed_at
        if (step := re.match(r"step +(\d+)/", line)) is None:
            continue
        if killed_at is not None and RECOVERED not in found:
            found[RECOVERED] = now - killed_at
        if victim is not None and killed_at is None and int(step[1]) == KILLED_AFTER:
            killed_at = now
            os.kill(processes(folder, f"policy-{victim}")[-1], signal.SIGKILL)
    if process.wait():
        sys.exit(f"the run in {folder} ended with status {process.returncode}")
    return found | (parts(folder) if found else {})


def parts(folder: Path) -> dict[str, float]:
    """Return the times of the last start in seconds, by part."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if "timing/setup/policy/import" in line][-1]
    return {part: last[f"timing/setup/{name}"] for part, name in PARTS.items()}


def processes(folder: Path, worker: str) -> list[int]:
    """Return the processes that a worker has had."""
    return [int(one) for one in re.findall(r"process (\d+)", (folder / "logs" / f"{worker}.log").read_text())]


def check(hit: Path, alone: Path, victim: int) -> None:
    """Compare a run with an undisturbed one. Raises SystemExit: it differs, or other processes have restarted."""
    restarted = [worker for worker in WORKERS if len(processes(hit, worker)) > 1]
    if restarted != [f"policy-{victim}"]:
        sys.exit(f"processes that have restarted: {restarted}")
    weights, expected = (load_file(folder / "hf" / "model.safetensors") for folder in (hit, alone))
    if not all(torch.equal(weights[name], tensor) for name, tensor in expected.items()):
        sys.exit("the weights differ from those of the undisturbed run")


def trial() -> None:
    """Compose the run."""
    compose_config([f"policy.model_name={KNOWN_MODEL}", *SETTINGS])
    print(record.write("restart", [record.result(part, "none", "s", [0.0]) for part in PARTS], []))


if __name__ == "__main__":
    record.start(main, trial)
