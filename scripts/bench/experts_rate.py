"""What each way to run a mixture of experts on GPUs gives: tokens a second, phases, memory next to the plan's, refits.

experts_rate.py MODEL [--gpus 2] [--steps 5] [--small] [--only NAME ...] [--record NAME]
                     [-- OVERRIDE ...]

MODEL is a folder with random weights (random_model.py, shape qwen3-30b-a3b:4), so that responses are long. A step has
32 prompts x 8 samples x 512 tokens, or with `--small` a few short ones on two CPU ranks. Experts are spread over the
GPUs, and each engine has a GPU, unless a setting says otherwise. The first step of a run does not count. The record is
written after each setting.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record
from plan_check import fullest_pack
from whole_runs import LARGE, PHASES, STEPS_ALONE, one_run, results_of

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.host.machine import gpu_bytes
from nemo_rl_lite.models.shape import read_model_shape
from nemo_rl_lite.planning.budget import Budget, budget
from nemo_rl_lite.rules.compose import compose_config

MEGATRON, PACKING = "policy.megatron_cfg", "policy.sequence_packing"
SPREAD = f"{MEGATRON}.expert_model_parallel_size"
TOGETHER = "generation.vllm_cfg.tensor_parallel_size=2"
ON_GPUS = [
    *(*LARGE, "algorithm.num_prompts_per_step=32", "policy.train_global_batch_size=256"),
    *("generation.vllm_cfg.max_num_seqs=256", "generation.vllm_cfg.gpu_memory_utilization=0.25"),
    "algorithm.loss_fn.force_on_policy_ratio=false",
    # Nothing moves, so that each phase's memory can be compared with the plan's.
    *("offload=none", f"{PACKING}.train_mb_tokens=16384", f"{PACKING}.logprob_mb_tokens=16384"),
    *(f"{MEGATRON}.keep_logits=false", "generation.colocated.sleep=true", "+generation.vllm_kwargs.moe_backend=triton"),
]
SMALL = [
    *("policy.precision=bfloat16", "algorithm.num_prompts_per_step=4", "policy.train_global_batch_size=32"),
    *("algorithm.num_generations_per_prompt=8", "cluster.threads_per_worker=1"),
    *("generation.vllm_cfg.max_num_seqs=32", "policy.max_total_sequence_length=64"),
]
# Overrides of each setting.
SETTINGS: dict[str, list[str]] = {
    "the launcher's": [],
    "without permute fusion": [f"{MEGATRON}.moe_permute_fusion=false"],
    "without grouped GEMM": [f"{MEGATRON}.moe_grouped_gemm=false"],
    "routers in float32": [f"{MEGATRON}.moe_router_dtype=fp32"],
    "fused routers in float32": [f"{MEGATRON}.moe_router_dtype=fp32", f"{MEGATRON}.moe_router_fusion=true"],
    "EP 1 (data parallel)": [f"{SPREAD}=1"],
    "engine TP 2": [TOGETHER],
    "engine TP 2, EP 2": [TOGETHER, "+generation.vllm_kwargs.enable_expert_parallel=true"],
}
ON_CPUS = ("the launcher's", "routers in float32", "EP 1 (data parallel)")
# Quantity, unit, metric, and what the metric is divided by.
GIB = 2**30
MEASURED = [
    ("tokens a second, whole step", "tokens/s", "performance/tokens_per_sec", 1),
    ("generated tokens a second", "tokens/s", "performance/generation_tokens_per_sec", 1),
    ("trained tokens a second", "tokens/s", "performance/policy_training_tokens_per_sec", 1),
    *PHASES,
    ("refit, transfer and load", "s", "refit/seconds", 1),
    ("bytes of a refit", "GB", "refit/bytes", 1e9),
    ("bandwidth of a refit", "GB/s", "refit/gb_per_s", 1),
    ("MFU of training", "share", "performance/train_fp_utilization", 1),
    ("bandwidth share of decoding", "share", "performance/generation_bandwidth_share", 1),
    ("mean logprob difference", "nats", "train/logprob_abs_diff_mean", 1),
    ("probe's logprob difference", "nats", "refit/probe_logprob_diff", 1),
    ("policy's reserved memory, logprob", "GiB", "memory/policy_reserved_bytes/logprob", GIB),
    ("policy's reserved memory, train", "GiB", "memory/policy_reserved_bytes/train", GIB),
]
MOST_ERROR = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a few short responses, for CPUs")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, help="measure these settings alone")
    parser.add_argument("--record", default="experts-rate", help="the name of the record")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    ranks = "cluster.cpu_ranks=2" if given.small else f"cluster.gpus_per_node={given.gpus}"
    own = [*(SMALL if given.small else ON_GPUS), *STEPS_ALONE, ranks, f"policy.model_name={given.model.resolve()}"]
    own += [f"algorithm.max_num_steps={given.steps}", f"{SPREAD}={2 if given.small else given.gpus}", *given.overrides]
    results: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    for name in given.only or (ON_CPUS if given.small else SETTINGS):
        overrides = [*own, *SETTINGS[name]]
        config = compose_config(overrides)
        steps, _ = one_run(overrides, warm=1)
        results += results_of(steps, name, MEASURED)
        memory, error = of_memory(name, config, steps)
        results += memory
        if error is not None:
            bars.append(record.bar(f"plan's error in the policy's training memory, {name}", error, MOST_ERROR, False))
        print(name, {one["name"]: f"{one['median']:.4g}" for one in results if one["config"] == name}, flush=True)
        print(record.write(given.record, results, bars, f"model: {given.model.name}"), flush=True)


def of_memory(
    name: str, config: Config, steps: Sequence[dict[str, float]]
) -> tuple[list[dict[str, Any]], float | None]:
    """The measured bytes of each phase next to those of the plan, and the plan's error of the policy's training memory;
    None on CPUs, where nothing measures it."""
    planned, results, error = plan_of(config, steps), [], None
    for what, metric, predicted in [
        ("policy's peak", "memory/policy_peak_bytes", planned.policy),
        ("GPU in use", "memory/device_bytes", planned.device),
    ]:
        for phase, nbytes in predicted.items():
            found = [line[f"{metric}/{phase}"] for line in steps if f"{metric}/{phase}" in line]
            if not found:
                continue
            ratio, title = nbytes / max(found), f"{what}, {phase}"
            results.append(record.result(title, name, "GiB", [one / GIB for one in found]))
            results.append(record.result(f"{title}, planned", name, "GiB", [nbytes / GIB]))
            results.append(record.result(f"{title}, planned over measured", name, "ratio", [ratio]))
            if (metric, phase.value) == ("memory/policy_peak_bytes", "train"):
                error = abs(ratio - 1)
    return results, error


def plan_of(config: Config, steps: Sequence[dict[str, float]]) -> Budget:
    """The plan for packs as full as those of the run were (see plan_check.py)."""
    shape = read_model_shape(config.policy.model_name)
    if shape is None:
        raise SystemExit(f"{config.policy.model_name} is a model of unknown shape, whose memory cannot be planned")
    names = ("performance/tokens_per_sec", "timing/train/total_step_time")
    run = {"series": {name: [(index, line[name]) for index, line in enumerate(steps)] for name in names}}
    on_gpus, policy = config.cluster.gpus_per_node > 0, config.policy
    if on_gpus:
        packing = dataclasses.replace(policy.sequence_packing, train_mb_tokens=fullest_pack(run, config))
        config = dataclasses.replace(config, policy=dataclasses.replace(policy, sequence_packing=packing))
    return budget(config, shape, gpu_bytes() if on_gpus else None)


if __name__ == "__main__":
    main()
