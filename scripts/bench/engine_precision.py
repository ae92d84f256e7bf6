"""What FP8 weights in the engines cost and give: mismatch with the policy, seconds and tokens a second, in GRPO runs.

engine_precision.py MODEL [--steps 6] [--ways bfloat16 fp8_per_block ...] [--small] [-- OVERRIDE ...]

64 prompts x 8 samples x 512 tokens a step on one GPU; the first step of a run does not count. MODEL is a folder; with
random weights (random_model.py) responses are long, but only a trained model's mismatch says anything. On CPUs, where
vLLM has no FP8 weights: `--small --ways bfloat16`. The record is written after each run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import record

from nemo_rl_lite.config.engines import VLLM_QUANTIZATIONS

WAYS = ("bfloat16", *VLLM_QUANTIZATIONS)
LARGE = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1"),
    *("policy.max_total_sequence_length=640", "generation.max_new_tokens=512", "algorithm.num_prompts_per_step=64"),
    *("algorithm.num_generations_per_prompt=8", "policy.train_global_batch_size=512"),
    *("algorithm.loss_fn.reference_policy_kl_penalty=0", "generation.vllm_cfg.gpu_memory_utilization=0.4"),
]
SMALL = [
    *("policy.precision=bfloat16", "algorithm.num_prompts_per_step=4", "policy.train_global_batch_size=32"),
    "algorithm.num_generations_per_prompt=8",
]
OFF = [
    *("algorithm.val_at_start=false", "algorithm.val_at_end=false", "algorithm.val_period=0", "logger.plots=false"),
    *("checkpoint.export_hf_at_end=false", "checkpoint.save_period=0"),
]
# What is measured: the metric, its unit, and what it is divided by.
MEASURED = {
    "gen_kl_error": ("train/gen_kl_error", "nats", 1),
    "token_mult_prob_error": ("train/token_mult_prob_error", "factor", 1),
    "mean absolute logprob difference": ("train/logprob_abs_diff_mean", "nats", 1),
    "logprob difference of a refit's probe": ("refit/probe_logprob_diff", "nats", 1),
    "generation": ("timing/train/generation", "s", 1),
    "generated tokens a second": ("performance/generation_tokens_per_sec", "tokens/s", 1),
    "whole step": ("timing/train/total_step_time", "s", 1),
    "refit": ("timing/train/prepare_for_generation/transfer_and_update_weights", "s", 1),
    "engine's weights": ("memory/measured/generate/generation_weights", "GiB", 2**30),
    "reward": ("train/reward", "", 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--small", action="store_true", help="a few short responses, for CPUs")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    own = [*(SMALL if given.small else LARGE), *OFF, f"policy.model_name={given.model.resolve()}"]
    own += [f"algorithm.max_num_steps={given.steps}", *given.overrides]
    results = []
    for way in given.ways:
        steps = one_run([*own, *([] if way == "bfloat16" else [f"+generation.vllm_kwargs.quantization={way}"])])
        for what, (metric, unit, divisor) in MEASURED.items():
            found = [line[metric] / divisor for line in steps if metric in line]
            results += [record.result(what, way, unit, found)] if found else []
        print(way, {one["name"]: f"{one['median']:.4g}" for one in results if one["config"] == way}, flush=True)
        print(record.write("engine-precision", results, [], f"model: {given.model.name}"))


def one_run(overrides: list[str]) -> list[dict[str, float]]:
    """Run the command; returns the metrics of its steps but the first."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "nemo_rl_lite.train", *overrides, f"hydra.run.dir={run}"]
        with (Path(folder) / "log").open("w") as log:
            status = subprocess.run(command, cwd=record.ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        if status:
            raise SystemExit(f"status {status} of {overrides}\n{(Path(folder) / 'log').read_text()[-4000:]}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "timing/train/total_step_time" in line][1:]


if __name__ == "__main__":
    main()
