"""Tokens a second of whole GRPO steps, by where rollouts come from: in turn, one step off, from a queue.

async_rate.py MODEL [--gpus N] [--steps 9] [--repeats 1] [--only NAME ...] [-- OVERRIDE ...]

MODEL: a folder with random weights (random_model.py), which end a response with each token with the same chance:
lengths are geometric, about 200 tokens before they are cut at 512. 64 prompts x 8 samples a step. The first two steps
of a run do not count; where rollouts are made ahead, neither do the two that follow, because a queue is filled in them,
nor the last two, because it is used up. Rollouts of a queue end nearly together, as many as it has, so its steps come
in cycles of age + 1. The record is written after each way. With one GPU,
policy and engine share it; with two, each has one, and the colocated layout has both for both. On CPUs: `--gpus 0`,
with the quickstart's sizes.
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

MEAN = 200
# Steps that do not count, at the start and at the end: in turn, and where rollouts are made ahead.
IN_TURN, AHEAD = (2, 0), (4, 2)
SIZES = [
    *("policy=megatron_gpu", "generation=vllm_gpu"),
    *("algorithm.num_prompts_per_step=64", "algorithm.num_generations_per_prompt=8"),
    *("generation.max_new_tokens=512", "policy.max_total_sequence_length=640"),
    *("policy.sequence_packing.enabled=true", "policy.sequence_packing.logprob_mb_tokens=16384"),
    "policy.train_global_batch_size=512",
]
CORRECTED = [
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
]
ONE_STEP_OFF = ["algorithm.rollouts.source=one_step_off", *CORRECTED]
QUEUE = ["algorithm.rollouts.source=queue", "algorithm.rollouts.max_trajectory_age_steps=2", *CORRECTED]
# An engine that stays awake on the policy's GPU leaves room for smaller packs.
SMALL_PACKS, LARGE_PACKS = (f"policy.sequence_packing.train_mb_tokens={tokens}" for tokens in (8192, 16384))
SHARED = ["cluster.gpus_per_node=1", "generation.vllm_cfg.gpu_memory_utilization=0.4", SMALL_PACKS]
ASLEEP, AWAKE = ([*SHARED, f"generation.colocated.sleep={sleep}"] for sleep in ("true", "false"))
APART = [
    *("cluster.gpus_per_node=2", "generation.colocated.enabled=false"),
    *("generation.colocated.resources.gpus_per_node=1", "generation.vllm_cfg.gpu_memory_utilization=0.85"),
    LARGE_PACKS,
]
BOTH = ["cluster.gpus_per_node=2", "generation.vllm_cfg.gpu_memory_utilization=0.4", LARGE_PACKS]
BOTH += ["generation.colocated.sleep=true"]
# By the number of GPUs: the ways to run, the first of which the others are compared with, and their targets.
Ways = dict[str, tuple[list[str], float | None]]
Found = dict[str, list[dict[str, float]]]
WAYS: dict[int, Ways] = {
    0: {
        "in turn": ([], None),
        "one step off": (ONE_STEP_OFF, None),
        "queue, age 2, in flight": (QUEUE, None),
    },
    1: {
        "in turn, engine sleeps": (ASLEEP, None),
        "in turn, engine awake": (AWAKE, None),
        "one step off, engine awake": ([*AWAKE, *ONE_STEP_OFF], None),
        "queue, age 2, in flight, engine awake": ([*AWAKE, *QUEUE], None),
    },
    2: {
        "in turn, 1 + 1": (APART, None),
        "one step off, 1 + 1": ([*APART, *ONE_STEP_OFF], 1.5),
        "queue, age 2, in flight, 1 + 1": ([*APART, *QUEUE], 1.7),
        "in turn, both colocated": (BOTH, None),
    },
}
SECONDS = {
    "whole step": "timing/train/total_step_time",
    "policy waits for a rollout": "timing/train/generation",
    "logprob": "timing/train/policy_and_reference_logprobs",
    "train": "timing/train/policy_training",
    "refit": "timing/train/prepare_for_generation/transfer_and_update_weights",
    "engines idle": "timing/rollout/engines_idle",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpus", type=int, default=1, choices=sorted(WAYS))
    parser.add_argument("--steps", type=int, default=9, help="that count: with a queue of age 2, whole threes")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="these ways alone")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    own = [*([*SIZES, _stops(given.model)] if given.gpus else []), *STEPS_ALONE, *given.overrides]
    own.append(f"policy.model_name={given.model.resolve()}")
    ways = {name: way for name, way in WAYS[given.gpus].items() if not given.only or name in given.only}
    found: Found = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, (overrides, _) in ways.items():
            found[name] += one_run([*own, *overrides], given.steps)
            rates = [round(rate) for rate in of(found[name], "tokens a second")]
            measured = [what for what in SECONDS if of(found[name], what)]
            medians = {what: statistics.median(of(found[name], what)) for what in measured}
            print(name, rates, {what: round(seconds, 3) for what, seconds in medians.items()}, flush=True)
            print(write({name: steps for name, steps in found.items() if steps}, ways, given.model.name), flush=True)


def write(found: Found, ways: Ways, model: str) -> Path:
    """Write the record of the ways measured so far."""
    results, bars = [], []
    for name, steps in found.items():
        results.append(
            record.result("generated tokens a second, whole step", name, "1/s", of(steps, "tokens a second"))
        )
        results += [record.result(what, name, "s", seconds) for what in SECONDS if (seconds := of(steps, what))]
        results.append(record.result("mean age of a token", name, "steps", of(steps, "age")))
    first = next(iter(found))
    for name in found:
        target = ways[name][1]
        if target is not None and name != first:
            faster = _rate(found[name]) / _rate(found[first])
            bars.append(record.bar(f"tokens a second, {name} over {first}", faster, target, True))
        if "in flight" in name:
            share = statistics.median(of(found[name], "refit")) / statistics.median(of(found[name], "whole step"))
            bars.append(record.bar(f"refit over whole step, {name}", share, 0.05, False))
    return record.write("async-rate", results, bars, f"model: {model}, random weights")


def of(steps: list[dict[str, float]], what: str) -> list[float]:
    """All values of a quantity; empty where the runs do not have it."""
    return [step[what] for step in steps if what in step]


def _rate(steps: list[dict[str, float]]) -> float:
    """Tokens over seconds: the steps differ in their numbers of tokens."""
    return sum(of(steps, "tokens")) / sum(of(steps, "whole step"))


def _stops(model: Path) -> str:
    """So many end tokens that a response has `MEAN` tokens on average before it is cut."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    return f"generation.stop_token_ids={list(range(1000, 1000 + vocabulary // MEAN))}".replace(" ", "")


def one_run(overrides: list[str], steps: int) -> list[dict[str, float]]:
    """Run the command for `steps` steps that count; returns these."""
    warm, drained = AHEAD if any(one.startswith("algorithm.rollouts.source=") for one in overrides) else IN_TURN
    overrides = [*overrides, f"algorithm.max_num_steps={warm + steps + drained}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nemo_rl_lite.train", f"hydra.run.dir={folder}/run", *overrides]
        done = subprocess.run(command, cwd=record.ROOT, env=os.environ, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"status {done.returncode}: {' '.join(command)[:2000]}\n{done.stdout[-3000:]}")
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    by_step: dict[int, dict[str, float]] = {}
    for line in lines:
        by_step.setdefault(line["step"], {}).update(line)
    return [_measured(by_step[step]) for step in range(warm + 1, warm + steps + 1)]


def _measured(line: dict[str, float]) -> dict[str, float]:
    seconds = {what: line[name] for what, name in SECONDS.items() if name in line}
    tokens = line["train/global_valid_toks"]
    rate = tokens / seconds["whole step"]
    return seconds | {"tokens": tokens, "tokens a second": rate, "age": line["train/trajectory_age_mean"]}


if __name__ == "__main__":
    main()
