"""What each change gave: seconds of a step's phases with it and without, on one GPU in one lease.

speed_ablation.py TASK MODEL [--steps 11] [--only NAME ...] [-- OVERRIDE ...]

TASK `small`: chain_sum with up to 32 new tokens (the recipe grpo-smollm2-135m-1n1g, one optimizer step a rollout).
TASK `large`: 64 x 8 responses of 512 tokens each, without a KL penalty. Each line adds a change to those before it.
The first three steps do not count.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

WARM = 3
SMALL = ["recipes=grpo-smollm2-135m-1n1g", "policy.train_global_batch_size=512"]
LARGE = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1"),
    *("policy.max_total_sequence_length=640", "generation.max_new_tokens=512", "algorithm.num_prompts_per_step=64"),
    *("algorithm.num_generations_per_prompt=8", "policy.train_global_batch_size=512", "algorithm.val_period=0"),
    *("algorithm.loss_fn.reference_policy_kl_penalty=0", "generation.vllm_cfg.gpu_memory_utilization=0.4"),
]
OFF = [
    *("algorithm.val_at_start=false", "algorithm.val_at_end=false", "logger.plots=false"),
    *("checkpoint.export_hf_at_end=false", "checkpoint.save_period=0"),
]
TASKS = {"small": SMALL, "large": LARGE}
PACKS = "policy.sequence_packing"
SCHEDULER = "++generation.vllm_kwargs.scheduler_cls"
VLLM_S_OWN = f"{SCHEDULER}=vllm.v1.core.sched.async_scheduler.AsyncScheduler"
OURS = f"{SCHEDULER}=nemo_rl_lite.generation.vllm.scheduler.DecodeScheduler"
AUTO = [f"{PACKS}.train_mb_tokens=auto", f"{PACKS}.logprob_mb_tokens=auto", "offload=auto"]
# Overrides of each line, on top of those of the lines before.
CHANGES = {
    "small": {
        "a pass for logprobs, packs of 16,384": [
            *("algorithm.loss_fn.force_on_policy_ratio=false", f"{PACKS}.train_mb_tokens=16384"),
            *(f"{PACKS}.logprob_mb_tokens=16384", "generation.colocated.sleep=true", VLLM_S_OWN),
        ],
        "no pass that repeats": ["algorithm.loss_fn.force_on_policy_ratio=null"],
        "packs of 65,536": [f"{PACKS}.train_mb_tokens=65536", f"{PACKS}.logprob_mb_tokens=65536"],
        "auto: the engine stays awake": [*AUTO, "generation.colocated.sleep=auto"],
        "a short way through the scheduler": [OURS],
        "CUDA graphs of the training step": ["policy.megatron_cfg.cuda_graph_impl=full_iteration"],
    },
    "large": {
        "a pass for logprobs, packs of 8,192": [
            *("algorithm.loss_fn.force_on_policy_ratio=false", f"{PACKS}.train_mb_tokens=8192"),
            *(f"{PACKS}.logprob_mb_tokens=16384", VLLM_S_OWN),
        ],
        "no pass that repeats": ["algorithm.loss_fn.force_on_policy_ratio=null"],
        "packs of 16,384": [f"{PACKS}.train_mb_tokens=16384"],
        "auto, and half of the GPU for the engine": [*AUTO, "generation.vllm_cfg.gpu_memory_utilization=0.5"],
        "a short way through the scheduler": [OURS],
        "logits kept": ["policy.megatron_cfg.keep_logits=true"],
    },
}
SECONDS = {
    "whole step": "timing/train/total_step_time",
    "generation": "timing/train/generation",
    "logprob": "timing/train/policy_and_reference_logprobs",
    "train": "timing/train/policy_training",
    "refit": "timing/train/prepare_for_generation/transfer_and_update_weights",
}
# What runs on GPUs have besides: quantity, unit, metric, and what the metric is divided by.
MORE = [
    ("policy's memory in training", "GiB", "memory/policy_peak_bytes/train", 2**30),
    ("MFU of training", "share", "performance/train_fp_utilization", 1),
    ("bandwidth share of decoding", "share", "performance/generation_bandwidth_share", 1),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--only", nargs="*", help="measure these lines alone")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    own = [*TASKS[given.task], *OFF, f"policy.model_name={given.model.resolve()}"]
    own += [f"algorithm.max_num_steps={given.steps}", *given.overrides]
    results, so_far = [], []
    for name, change in CHANGES[given.task].items():
        so_far += change
        if given.only and name not in given.only:
            continue
        steps, first_s = one_run([*own, *so_far])
        results.append(record.result("command to first step", name, "s", [first_s]))
        for what, metric in SECONDS.items():
            results.append(record.result(what, name, "s", [line[metric] for line in steps]))
        for what, unit, metric, by in MORE:
            found = [line[metric] / by for line in steps if metric in line]
            results += [record.result(what, name, unit, found)] if found else []
        shown = {one["name"]: round(one["median"], 3) for one in results if one["config"] == name}
        print(name, shown, flush=True)
        record.write(f"speed-ablation-{given.task}", results, [])


def one_run(overrides: list[str]) -> tuple[list[dict[str, float]], float]:
    """Run the command; returns its steps that count, and the seconds from the command to the first step."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "nemo_rl_lite.train", *overrides, f"hydra.run.dir={run}"]
        started = time.time()
        with (Path(folder) / "log").open("w") as log:
            status = subprocess.run(command, cwd=record.ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        if status:
            raise SystemExit(f"status {status} of {overrides}\n{(Path(folder) / 'log').read_text()[-4000:]}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "timing/train/total_step_time" in line]
        first = steps[0]["time"] - steps[0]["timing/train/total_step_time"] - started
        return steps[WARM:], first


if __name__ == "__main__":
    main()
