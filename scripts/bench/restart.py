"""Measure how a run recovers from a lost policy rank: restart.py [--reps N] [--model MODEL --gpus N] [-- OVERRIDE ...]

SIGKILL hits one of four policy ranks on CPUs after a checkpoint, or one of several on GPUs. Seconds are from the kill
to the end of the next step. The parts of the restart are those of the run's metrics, in the slowest rank. All other
processes must be the same. On CPUs, the weights at the end must be bitwise identical to those of an undisturbed run.

MODEL is a folder, also one with random weights (random_model.py). On GPUs, two tensor-parallel ranks are a replica,
engines share the GPUs, and kills hit different phases of a step. Such a run ends after its first step with the new
rank. The record is written after each repetition.
"""

import argparse
import json
import os
import re
import shutil
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
from whole_runs import KNOWN_MODEL, model_key

from nemo_rl_lite.validation.compose import compose_config

STEPS, KILLED_AFTER = 8, 4
COMMON = [
    *(f"algorithm.max_num_steps={STEPS}", "algorithm.num_prompts_per_step=8", "policy.train_global_batch_size=64"),
    *("algorithm.val_period=0", "algorithm.val_at_start=false", "algorithm.val_at_end=false", "logger.plots=false"),
    "checkpoint.async_save=false",
]
CPU_RANKS = 4
ON_CPUS = [
    *(*COMMON, "policy.train_micro_batch_size=16", "policy.logprob_batch_size=16", f"cluster.cpu_ranks={CPU_RANKS}"),
    *("generation=transformers", "generation.colocated.enabled=false", "generation.data_parallel_size=2"),
    "checkpoint.save_period=1",
]
ON_GPUS = [
    *(*COMMON, "policy=megatron_gpu", "generation=vllm_gpu", "policy.megatron_cfg.tensor_model_parallel_size=2"),
    *("policy.max_total_sequence_length=640", "generation.max_new_tokens=512", "offload=pinned"),
    *("algorithm.num_generations_per_prompt=8", "algorithm.loss_fn.reference_policy_kl_penalty=0"),
    # A checkpoint of a large model takes long.
    *(f"checkpoint.save_period={KILLED_AFTER}", "checkpoint.export_hf_at_end=false"),
]
# Seconds from the end of a step to the kill, by repetition.
KILL_S = (0.0, 2.0, 5.0)
# Parts of a restart, and their metrics below `timing/setup/`.
PARTS = {"process start": "policy/process", "imports": "policy/import", "model build": "policy/build", "load": "resume"}
LOST, RECOVERED = "lost rank noticed", "from the kill to the next step's end"
# On GPUs, with 8 billion parameters.
TARGET_S = 60.0


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    ranks, settings = given.gpus or CPU_RANKS, [*settings_of(given.gpus, given.model), *given.overrides]
    found = defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "alone"
        if not given.gpus:
            run(alone, settings, None)
        for repetition in range(given.reps):
            hit, victim = Path(folder) / f"hit-{repetition}", repetition % ranks
            after_s = KILL_S[repetition % len(KILL_S)] if given.gpus else 0.0
            for name, seconds in run(hit, settings, victim, after_s, is_whole=not given.gpus).items():
                found[name].append(seconds)
            check_processes(hit, victim)
            if not given.gpus:
                check_weights(hit, alone)
            # Checkpoints of a large model fill a disk.
            shutil.rmtree(hit)
            results = [record.result(name, f"one of {ranks} ranks killed", "s", reps) for name, reps in found.items()]
            bars = [record.bar(RECOVERED, max(found[RECOVERED]), TARGET_S, at_least=False)] if given.gpus else []
            print(record.write("restart", results, bars), flush=True)


def settings_of(gpus: int, model: Path | None) -> list[str]:
    """Return the run's settings. Raises SystemExit: there are GPUs without a model."""
    if not gpus:
        return ON_CPUS
    if model is None:
        sys.exit("--gpus needs --model")
    return [*ON_GPUS, f"cluster.gpus_per_node={gpus}", model_key(model)]


def run(
    folder: Path, settings: list[str], victim: int | None, after_s: float = 0.0, is_whole: bool = True
) -> dict[str, float]:
    """Train in a folder, and kill a policy rank `after_s` seconds after the end of a step. Return the recovery times in
    seconds, by name. `is_whole`: also train the steps after the recovery."""
    command = [sys.executable, "-m", "nemo_rl_lite.train", f"hydra.run.dir={folder}", *settings]
    process = subprocess.Popen(command, cwd=record.ROOT, stdout=subprocess.PIPE, text=True)
    killed_at, found = None, dict[str, float]()
    for line in process.stdout or ():
        now = time.monotonic()
        if killed_at is not None and "restarting from the last checkpoint" in line:
            found[LOST] = now - killed_at
        if (step := re.match(r"step +(\d+)/", line)) is None:
            continue
        if killed_at is not None and LOST in found and RECOVERED not in found:
            found[RECOVERED] = now - killed_at
            if not is_whole:
                process.send_signal(signal.SIGINT)
        if victim is not None and killed_at is None and int(step[1]) == KILLED_AFTER:
            time.sleep(after_s)
            killed_at = now + after_s
            os.kill(processes(folder, f"policy-{victim}")[-1], signal.SIGKILL)
    # 130: Ctrl-C.
    if process.wait() not in ((0,) if is_whole else (130,)):
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


def check_processes(hit: Path, victim: int) -> None:
    """Raise SystemExit if processes other than the lost policy rank's have restarted."""
    workers = sorted(log.stem for log in (hit / "logs").glob("*.log") if re.match(r"(policy|generation)-", log.name))
    restarted = [worker for worker in workers if len(processes(hit, worker)) > 1]
    if restarted != [f"policy-{victim}"]:
        sys.exit(f"processes that have restarted: {restarted}")


def check_weights(hit: Path, alone: Path) -> None:
    """Raise SystemExit if the weights differ from those of an undisturbed run."""
    weights, expected = (load_file(folder / "hf" / "model.safetensors") for folder in (hit, alone))
    if not all(torch.equal(weights[name], tensor) for name, tensor in expected.items()):
        sys.exit("the weights differ from those of the undisturbed run")


def trial() -> None:
    """Compose the runs."""
    compose_config([f"policy.model_name={KNOWN_MODEL}", *ON_CPUS])
    compose_config(settings_of(4, Path(KNOWN_MODEL)))
    print(record.write("restart", [record.result(part, "none", "s", [0.0]) for part in PARTS], []))


if __name__ == "__main__":
    record.start(main, trial)
