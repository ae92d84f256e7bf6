"""What router replay does to the mismatch between policy and engines, and what it costs, in GRPO runs of one model.

router_replay.py MODEL [--ways without with] [--steps 5] [--small] [-- OVERRIDE ...]

MODEL is the folder of a mixture of experts; with random weights (random_model.py) responses are long. A step has 16
prompts x 8 samples x 256 tokens on one GPU, or with `--small` a few short responses on CPUs. The first step of a run
does not count. The record is written after each run.

A control is `--ways without` with qwen3-moe-no-choice, whose tokens go to all of its experts: there engine and policy
differ by rounding alone.
"""

import argparse
from pathlib import Path
from typing import Any

import record
from whole_runs import STEPS_ALONE, one_run, results_of

WAYS = {"without": "false", "with": "true"}
ON_A_GPU = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "policy.max_total_sequence_length=384"),
    *("generation.max_new_tokens=256", "algorithm.num_prompts_per_step=16", "algorithm.num_generations_per_prompt=8"),
    *("policy.train_global_batch_size=128", "generation.vllm_cfg.max_num_seqs=128"),
    *("generation.vllm_cfg.gpu_memory_utilization=0.4", "+generation.vllm_kwargs.moe_backend=triton"),
]
SMALL = [
    *("policy.precision=bfloat16", "cluster.threads_per_worker=1", "algorithm.num_prompts_per_step=4"),
    *("algorithm.num_generations_per_prompt=4", "policy.train_global_batch_size=16"),
    *("policy.max_total_sequence_length=128", "generation.max_new_tokens=16"),
]
# Quantity, unit, metric, and what the metric is divided by.
MEASURED = [
    ("mean absolute logprob difference", "nats", "train/logprob_abs_diff_mean", 1),
    ("largest logprob difference", "nats", "train/logprob_abs_diff_max", 1),
    ("token_mult_prob_error", "factor", "train/token_mult_prob_error", 1),
    ("gen_kl_error", "nats", "train/gen_kl_error", 1),
    ("generation", "s", "timing/train/generation", 1),
    ("logprob", "s", "timing/train/policy_and_reference_logprobs", 1),
    ("train", "s", "timing/train/policy_training", 1),
    ("whole step", "s", "timing/train/total_step_time", 1),
]
# What replay is for, and how much of it may be left.
KINDS, MOST_MISMATCH = ("mean absolute logprob difference", "gen_kl_error"), 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a few short responses, for CPUs")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    own = [*(SMALL if given.small else ON_A_GPU), *STEPS_ALONE, f"algorithm.max_num_steps={given.steps}"]
    results: list[dict[str, Any]] = []
    for way in given.ways:
        named = [f"policy.model_name={given.model.resolve()}", f"policy.router_replay.enabled={WAYS[way]}"]
        steps, _ = one_run([*own, *named, *given.overrides], warm=1)
        found = results_of(steps, f"{way} replay", MEASURED)
        print(way, {one["name"]: f"{one['median']:.4g}" for one in found}, flush=True)
        results += found
        print(record.write(f"experts-router-replay-{given.model.name}", results, bars(results)), flush=True)


def bars(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much of each kind of mismatch is left, once both ways are measured."""
    bars = []
    for kind in KINDS:
        found = {one["config"]: one["median"] for one in results if one["name"] == kind}
        if len(found) == len(WAYS):
            share = found["with replay"] / found["without replay"]
            bars.append(record.bar(f"{kind} with replay, of that without", share, MOST_MISMATCH, at_least=False))
    return bars


if __name__ == "__main__":
    main()
