"""Refits of LoRA adapters against refits of merged weights, in whole GRPO runs on one GPU without a break.

With the ways one_copy and two_copies, engines stay awake, and share the frozen weights with the policy or do not;
compare them with micro-batches of one size (policy.sequence_packing.train_mb_tokens=16384).

lora_refit.py {small|large} MODEL [--ways WAY ...] [--dims 16 64] [--steps 11] [-- OVERRIDE ...]

The tasks are those of speed_ablation.py with all that it adds; trl_step.py --lora runs them with TRL and peft. The
first three steps do not count. Writes lora-refit-{small|large}-<hardware>.json after each run, or another name.
"""

import argparse
from pathlib import Path
from typing import Any

import record
from speed_ablation import AUTO, TASKS, WARM
from whole_runs import PHASES, STEPS_ALONE, one_run, results_of

PEFT = "policy.megatron_cfg.peft"
WAYS = {
    "merged": ["generation.vllm_cfg.lora=merged"],
    "adapters": ["generation.vllm_cfg.lora=adapters"],
    "one_copy": ["generation.vllm_cfg.lora=adapters", "generation.colocated.sleep=false"],
    "two_copies": ["generation.vllm_cfg.lora=adapters", "generation.colocated.sleep=false", "refit.direct=false"],
}
# Quantity, unit, metric, and what the metric is divided by.
MORE = [
    ("refit, transfer and load", "s", "refit/seconds", 1),
    ("bytes of a refit", "MB", "refit/bytes", 1e6),
    ("engine wakes", "s", "refit/wake_s", 1),
    ("engine sleeps", "s", "timing/train/generation_sleep", 1),
    ("mean logprob difference", "nats", "train/logprob_abs_diff_mean", 1),
    ("policy's memory in training", "GiB", "memory/policy_peak_bytes/train", 2**30),
    ("GPU in use while generating", "GiB", "memory/device_bytes/generate", 2**30),
    ("GPU in use after training", "GiB", "memory/device_bytes/train", 2**30),
    ("engine's weights", "GiB", "memory/measured/generate/generation_weights", 2**30),
]
MOST_BYTES, MOST_SECONDS = 1 / 20, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["merged", "adapters"])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--record", default="refit", help="what is measured, in the name of the record")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    own = [*TASKS[given.task], *STEPS_ALONE, *AUTO, f"policy.model_name={given.model.resolve()}"]
    own += [f"algorithm.max_num_steps={given.steps}", f"{PEFT}.enabled=true"]
    own += ["policy.megatron_cfg.optimizer.lr=1e-4", *given.overrides]
    results: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    for dim in given.dims:
        found = {way: _measured(way, dim, own) for way in given.ways}
        results += [result for of_way in found.values() for result in of_way]
        if {"merged", "adapters"} <= found.keys():
            pair = (found["merged"], found["adapters"])
            bars += _bars(dim, *({one["name"]: one["median"] for one in of_way} for of_way in pair))
        print(record.write(f"lora-{given.record}-{given.task}", results, bars), flush=True)


def _measured(way: str, dim: int, overrides: list[str]) -> list[dict[str, Any]]:
    """Run the task once; return the results of its steps."""
    config = f"{way}, {dim} dimensions"
    own = [f"{PEFT}.dim={dim}", f"{PEFT}.alpha={2 * dim}", *WAYS[way]]
    steps, first_s = one_run([*overrides, *own], WARM)
    results = [record.result("command to first step", config, "s", [first_s])]
    results += results_of(steps, config, [*PHASES, *MORE])
    print(config, {one["name"]: round(one["median"], 4) for one in results}, flush=True)
    return results


def _bars(dim: int, merged: dict[str, float], adapters: dict[str, float]) -> list[dict[str, Any]]:
    share = adapters["bytes of a refit"] / merged["bytes of a refit"]
    seconds = adapters["refit, transfer and load"]
    return [
        record.bar(f"bytes of adapters, of those of merged weights, {dim} dimensions", share, MOST_BYTES, False),
        record.bar(f"refit of adapters, {dim} dimensions, s", seconds, MOST_SECONDS, False),
    ]


if __name__ == "__main__":
    main()
