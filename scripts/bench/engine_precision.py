"""What FP8 weights in the engines cost and give: mismatch with the policy, seconds and tokens a second, in GRPO runs.

engine_precision.py MODEL [--steps 6] [--ways bfloat16 fp8_per_block ...] [--small] [-- OVERRIDE ...]

64 prompts x 8 samples x 512 tokens a step on one GPU; the first step of a run does not count. MODEL is a folder; with
random weights (random_model.py) responses are long, but only a trained model's mismatch says anything. On CPUs, where
vLLM has no FP8 weights: `--small --ways bfloat16`. The record is written after each run.
"""

import argparse
from pathlib import Path

import record
from whole_runs import LARGE, STEPS_ALONE, one_run, results_of

from nemo_rl_lite.config.engines import VLLM_QUANTIZATIONS

WAYS = ("bfloat16", *VLLM_QUANTIZATIONS)
SMALL = [
    *("policy.precision=bfloat16", "algorithm.num_prompts_per_step=4", "policy.train_global_batch_size=32"),
    "algorithm.num_generations_per_prompt=8",
]
# Quantity, unit, metric, and what the metric is divided by.
MEASURED = [
    ("gen_kl_error", "nats", "train/gen_kl_error", 1),
    ("token_mult_prob_error", "factor", "train/token_mult_prob_error", 1),
    ("mean absolute logprob difference", "nats", "train/logprob_abs_diff_mean", 1),
    ("logprob difference of a refit's probe", "nats", "refit/probe_logprob_diff", 1),
    ("generation", "s", "timing/train/generation", 1),
    ("generated tokens a second", "tokens/s", "performance/generation_tokens_per_sec", 1),
    ("whole step", "s", "timing/train/total_step_time", 1),
    ("refit", "s", "timing/train/prepare_for_generation/transfer_and_update_weights", 1),
    ("engine's weights", "GiB", "memory/measured/generate/generation_weights", 2**30),
    ("reward", "", "train/reward", 1),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--small", action="store_true", help="a few short responses, for CPUs")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    own = [*(SMALL if given.small else LARGE), *STEPS_ALONE, f"policy.model_name={given.model.resolve()}"]
    own += [f"algorithm.max_num_steps={given.steps}", *given.overrides]
    results, stopped = [], []
    for way in given.ways:
        quantized = [] if way == "bfloat16" else [f"+generation.vllm_kwargs.quantization={way}"]
        steps = []
        try:
            steps, _ = one_run([*own, *quantized], warm=1)
        except SystemExit as error:
            # Not every model has layers for every way.
            stopped.append(f"{way} stopped")
            print(error, flush=True)
        results += results_of(steps, way, MEASURED)
        print(way, {one["name"]: f"{one['median']:.4g}" for one in results if one["config"] == way}, flush=True)
        note = "; ".join([f"model: {given.model.name}", *stopped])
        print(record.write(f"engine-precision-{given.model.name}", results, [], note))


if __name__ == "__main__":
    main()
