"""Whole runs of the train command: what is switched off in them, what their steps measure, and results made of it."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record

# A run keeps nothing but its metrics, and takes steps and does nothing else.
UNKEPT = ["checkpoint.export_hf_at_end=false", "checkpoint.save_period=0"]
STEPS_ALONE = [
    *("algorithm.val_at_start=false", "algorithm.val_at_end=false", "algorithm.val_period=0", "logger.plots=false"),
    *UNKEPT,
]
# 64 prompts x 8 responses of 512 tokens on one GPU, without a KL penalty.
LARGE = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1"),
    *("policy.max_total_sequence_length=640", "generation.max_new_tokens=512", "algorithm.num_prompts_per_step=64"),
    *("algorithm.num_generations_per_prompt=8", "policy.train_global_batch_size=512"),
    *("algorithm.loss_fn.reference_policy_kl_penalty=0", "generation.vllm_cfg.gpu_memory_utilization=0.4"),
]
STEP = "timing/train/total_step_time"
Quantity = tuple[str, str, str, float]
"""What it is, its unit, its metric, and what the metric is divided by."""
PHASES: list[Quantity] = [
    ("whole step", "s", STEP, 1),
    ("generation", "s", "timing/train/generation", 1),
    ("logprob", "s", "timing/train/policy_and_reference_logprobs", 1),
    ("train", "s", "timing/train/policy_training", 1),
    ("refit", "s", "timing/train/prepare_for_generation/transfer_and_update_weights", 1),
]


def one_run(overrides: Sequence[str], warm: int) -> tuple[list[dict[str, float]], float]:
    """Run the command; returns the metrics of its steps but the first `warm`, and the seconds from the command to the
    first step."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        steps = run_in(Path(folder) / "run", overrides)
    return steps[warm:], steps[0]["time"] - steps[0][STEP] - started


def run_in(folder: Path, overrides: Sequence[str]) -> list[dict[str, float]]:
    """Run the command in a folder; returns the metrics of its steps. Raises SystemExit: it failed."""
    command = [sys.executable, "-m", "nemo_rl_lite.train", *overrides, f"hydra.run.dir={folder}"]
    with tempfile.TemporaryFile("w+") as log:
        status = subprocess.run(command, cwd=record.ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        if status:
            log.seek(0)
            raise SystemExit(f"status {status} of {overrides}\n{log.read()[-4000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if STEP in line]


def results_of(steps: Sequence[dict[str, float]], config: str, quantities: Sequence[Quantity]) -> list[dict[str, Any]]:
    """The results of those of the quantities that the steps have."""
    results = []
    for what, unit, metric, by in quantities:
        found = [line[metric] / by for line in steps if metric in line]
        results += [record.result(what, config, unit, found)] if found else []
    return results
