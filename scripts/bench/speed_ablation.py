"""What each change gave: seconds of a step's phases with it and without, on one GPU without a break.

speed_ablation.py TASK MODEL [--steps 11] [--only NAME ...] [-- OVERRIDE ...]

TASK `small`: chain_sum with up to 32 new tokens (the recipe grpo-smollm2-135m-1n1g, one optimizer step a rollout).
TASK `large`: 64 x 8 responses of 512 tokens each, without a KL penalty. Each line adds a change to those before it.
The first three steps do not count.
"""

import argparse
from pathlib import Path

import record
from whole_runs import LARGE, PHASES, STEPS_ALONE, one_run, results_of

WARM = 3
SMALL = ["recipes=grpo-smollm2-135m-1n1g", "policy.train_global_batch_size=512"]
TASKS = {"small": SMALL, "large": LARGE}
PACKS = "policy.sequence_packing"
SCHEDULER = "++generation.vllm_kwargs.scheduler_cls"
VLLM_S_OWN = f"{SCHEDULER}=vllm.v1.core.sched.async_scheduler.AsyncScheduler"
OURS = f"{SCHEDULER}=nemo_rl_lite.compat.vllm_scheduler.DecodeScheduler"
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
    own = [*TASKS[given.task], *STEPS_ALONE, f"policy.model_name={given.model.resolve()}"]
    own += [f"algorithm.max_num_steps={given.steps}", *given.overrides]
    results, so_far = [], []
    for name, change in CHANGES[given.task].items():
        so_far += change
        if given.only and name not in given.only:
            continue
        steps, first_s = one_run([*own, *so_far], WARM)
        results.append(record.result("command to first step", name, "s", [first_s]))
        results += results_of(steps, name, [*PHASES, *MORE])
        shown = {one["name"]: round(one["median"], 3) for one in results if one["config"] == name}
        print(name, shown, flush=True)
        record.write(f"speed-ablation-{given.task}", results, [])


if __name__ == "__main__":
    main()
