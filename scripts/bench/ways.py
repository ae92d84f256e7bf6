"""Compare ways to run the same GRPO task, by whole runs of the command on one machine.

ways.py COMPARISON MODEL [--steps N] [--only WAY ...] [--record NAME] [--other NAME=PATH:...] [-- OVERRIDE ...]

COMPARISON                  MODEL, and the task
speed                       qwen3-1.7b; 64 x 8 responses of 512 tokens on one GPU; each way adds to those before it
rollout_workers             the same, played by the launcher or by a rollout worker
lora, lora_copies           the same with adapters of rank 16: merged or served by engines; shared weights or not
router_replay               qwen3-moe-1.5b; 16 x 8 responses of 256 tokens on one GPU
experts                     qwen3-30b-a3b:4; 32 x 8 responses of 512 tokens on two GPUs
precision                   a trained model, since random weights have no mismatch that says anything; the task of speed
async_1, async_2            qwen3-1.7b; 64 x 8 responses of about 200 tokens on one GPU, or on two

MODEL is a folder with random weights (random_model.py) unless the table says otherwise: responses then have all tokens
that they may have. --other also runs each way with another checkout and other versions of packages, for instance of
the engine: its paths are the checkout and folders with packages. A record is written after each run. The first steps
do not count, and neither do the last of a run whose rollouts are made ahead, because its queue drains.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import record
from whole_runs import (
    KNOWN_EXPERTS,
    KNOWN_MODEL,
    PHASES,
    STEP,
    STEPS_ALONE,
    Quantity,
    model_key,
    one_run,
    results_of,
    tried,
)

from nemo_rl_lite.models.shape import find_shape

GIB = 2**30
MEGATRON, PACKS = "policy.megatron_cfg", "policy.sequence_packing"
ONE_GPU = ["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1"]
LARGE = [
    *(*ONE_GPU, "policy.max_total_sequence_length=640", "generation.max_new_tokens=512"),
    *("algorithm.num_prompts_per_step=64", "algorithm.num_generations_per_prompt=8"),
    *("policy.train_global_batch_size=512", "algorithm.loss_fn.reference_policy_kl_penalty=0"),
    "generation.vllm_cfg.gpu_memory_utilization=0.4",
]
AUTO = [f"{PACKS}.train_mb_tokens=auto", f"{PACKS}.logprob_mb_tokens=auto", "offload=auto"]
SCHEDULER = "++generation.vllm_kwargs.scheduler_cls"
MEMORY: list[Quantity] = [
    ("policy's memory in training", "GiB", "memory/policy_peak_bytes/train", GIB),
    ("GPU in use while generating", "GiB", "memory/device_bytes/generate", GIB),
    ("engine's weights", "GiB", "memory/measured/generate/generation_weights", GIB),
]
SHARES: list[Quantity] = [
    ("MFU of training", "share", "performance/train_fp_utilization", 1),
    ("bandwidth share of decoding", "share", "performance/generation_bandwidth_share", 1),
]
MISMATCH: list[Quantity] = [
    ("mean logprob difference", "nats", "train/logprob_abs_diff_mean", 1),
    ("max logprob difference", "nats", "train/logprob_abs_diff_max", 1),
    ("gen_kl_error", "nats", "train/gen_kl_error", 1),
    ("token_mult_prob_error", "factor", "train/token_mult_prob_error", 1),
]
REFIT_TRANSFER, WAKES = ("refit, transfer and load", "s", "refit/seconds", 1), ("engine wakes", "s", "refit/wake_s", 1)
REFITS: list[Quantity] = [
    REFIT_TRANSFER,
    ("bytes of a refit", "MB", "refit/bytes", 1e6),
    ("bandwidth of a refit", "GB/s", "refit/gb_per_s", 1),
    WAKES,
]
RATES: list[Quantity] = [
    ("throughput over the step", "tokens/s", "performance/tokens_per_sec", 1),
    ("throughput while generating", "tokens/s", "performance/generation_tokens_per_sec", 1),
]
WHOLE_RATE = "tokens of responses/seconds of the step"
"""Computed here from two metrics."""
AHEAD_QUANTITIES: list[Quantity] = [
    ("throughput over the step", "tokens/s", WHOLE_RATE, 1),
    *(PHASES[0], ("policy idle", "s", "timing/train/generation", 1), *PHASES[2:]),
    ("engines idle", "s", "timing/rollout/engines_idle", 1),
    ("mean staleness", "steps", "train/trajectory_age_mean", 1),
]
Medians = dict[str, dict[str, float]]
"""By way and quantity."""


@dataclass(frozen=True)
class Comparison:
    """A task, the ways to run it with their overrides, the quantities that are kept, and the bars."""

    record: str
    task: list[str]
    ways: dict[str, list[str]]
    quantities: list[Quantity] = field(default_factory=lambda: [*PHASES, *MEMORY, *SHARES])
    bars: Callable[[Medians], list[dict[str, Any]]] = lambda medians: []
    warm: int = 1


def _cumulative(changes: dict[str, list[str]]) -> dict[str, list[str]]:
    return dict(zip(changes, accumulate(changes.values(), lambda before, own: [*before, *own]), strict=True))


def _lora_bars(medians: Medians) -> list[dict[str, Any]]:
    merged, adapters = (medians.get(f"{way}, rank 16") for way in ("merged", "adapters"))
    if merged is None or adapters is None:
        return []
    share = adapters["bytes of a refit"] / merged["bytes of a refit"]
    return [
        record.bar("bytes of adapters, of those of merged weights", share, 1 / 20, False),
        record.bar("refit of adapters, s", adapters["refit, transfer and load"], 0.05, False),
    ]


def _replay_bars(medians: Medians) -> list[dict[str, Any]]:
    if len(medians) < 2:
        return []
    kind = "gen_kl_error"
    share = medians["with replay"][kind] / medians["without replay"][kind]
    return [record.bar(f"{kind} with replay, of that without", share, 0.5, at_least=False)]


def _async_bars(medians: Medians) -> list[dict[str, Any]]:
    name = AHEAD_QUANTITIES[0][0]
    if not {"sync, 1 + 1 GPUs", "one step off, 1 + 1 GPUs"} <= medians.keys():
        return []
    faster = medians["one step off, 1 + 1 GPUs"][name] / medians["sync, 1 + 1 GPUs"][name]
    return [record.bar("throughput, one step off over sync, 1 + 1 GPUs", faster, 1.5, at_least=True)]


LORA = [*LARGE, *AUTO, f"{MEGATRON}.peft.enabled=true", f"{MEGATRON}.peft.dim=16", f"{MEGATRON}.peft.alpha=32"]
LORA += [f"{MEGATRON}.optimizer.lr=1e-4"]
ADAPTERS, AWAKE = "generation.vllm_cfg.lora=adapters", "generation.colocated.sleep=false"
SPREAD = f"{MEGATRON}.expert_model_parallel_size"
CORRECTED = [
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
]
ONE_STEP_OFF = ["algorithm.rollouts.source=one_step_off", *CORRECTED]
QUEUE = ["algorithm.rollouts.source=queue", "algorithm.rollouts.max_trajectory_age_steps=2", *CORRECTED]
# A KL penalty is left in, so that there is a logprob phase.
ASYNC = [*LARGE[:-2], f"{PACKS}.enabled=true", f"{PACKS}.logprob_mb_tokens=16384"]
SMALL_PACKS, LARGE_PACKS = (f"{PACKS}.train_mb_tokens={tokens}" for tokens in (8192, 16384))
SHARED = [SMALL_PACKS, "generation.vllm_cfg.gpu_memory_utilization=0.4"]
TWO = ["cluster.gpus_per_node=2", LARGE_PACKS]
APART = [*TWO, "generation.colocated.enabled=false", "generation.colocated.resources.gpus_per_node=1"]
APART += ["generation.vllm_cfg.gpu_memory_utilization=0.85"]
COMPARISONS = {
    "speed": Comparison(
        "speed-ablation-large",
        LARGE,
        _cumulative(
            {
                "a pass for logprobs, packs of 8,192": [
                    *("algorithm.loss_fn.force_on_policy_ratio=false", f"{PACKS}.train_mb_tokens=8192"),
                    f"{PACKS}.logprob_mb_tokens=16384",
                    f"{SCHEDULER}=vllm.v1.core.sched.async_scheduler.AsyncScheduler",
                ],
                "no pass that repeats": ["algorithm.loss_fn.force_on_policy_ratio=null"],
                "packs of 16,384": [f"{PACKS}.train_mb_tokens=16384"],
                "auto, and half of the GPU for the engine": [*AUTO, "generation.vllm_cfg.gpu_memory_utilization=0.5"],
                "fast scheduler": [f"{SCHEDULER}=nemo_rl_lite.compat.vllm_scheduler.DecodeScheduler"],
                "logits kept": [f"{MEGATRON}.keep_logits=true"],
                "auto share of the GPU": ["generation.vllm_cfg.gpu_memory_utilization=auto"],
            }
        ),
        [*PHASES, REFIT_TRANSFER, WAKES, *MEMORY, *SHARES],
        warm=3,
    ),
    "rollout_workers": Comparison(
        "rollout-workers-large",
        [*LARGE, *AUTO, "generation.vllm_cfg.gpu_memory_utilization=0.5"],
        {f"{count} rollout workers": [f"algorithm.rollouts.num_workers={count}"] for count in (0, 1)},
        [*PHASES, ("launcher's CPU", "s", "performance/launcher_cpu_s", 1), *SHARES],
        warm=3,
    ),
    "lora": Comparison(
        "lora-refit-large",
        LORA,
        {
            "merged, rank 16": ["generation.vllm_cfg.lora=merged"],
            "adapters, rank 16": [ADAPTERS],
        },
        [*PHASES, *REFITS, *MEMORY],
        _lora_bars,
        warm=3,
    ),
    "lora_copies": Comparison(
        "lora-copies-large",
        [*LORA, f"{PACKS}.train_mb_tokens=16384"],
        {
            "one copy, rank 16": [ADAPTERS, AWAKE],
            "two copies, rank 16": [ADAPTERS, AWAKE, "refit.cuda_ipc=false"],
        },
        [*PHASES, *REFITS, *MEMORY],
        warm=3,
    ),
    "router_replay": Comparison(
        "experts-router-replay-{model}",
        [
            *(*ONE_GPU, "policy.max_total_sequence_length=384", "generation.max_new_tokens=256"),
            *("algorithm.num_prompts_per_step=16", "algorithm.num_generations_per_prompt=8"),
            *("policy.train_global_batch_size=128", "generation.vllm_cfg.max_num_seqs=128"),
            *("generation.vllm_cfg.gpu_memory_utilization=0.4", "+generation.vllm_kwargs.moe_backend=triton"),
        ],
        {f"{way} replay": [f"policy.router_replay.enabled={way == 'with'}"] for way in ("without", "with")},
        [*MISMATCH, *PHASES],
        _replay_bars,
    ),
    "experts": Comparison(
        "experts-rate",
        [
            *(*LARGE, "algorithm.num_prompts_per_step=32", "policy.train_global_batch_size=256"),
            *("cluster.gpus_per_node=2", f"{SPREAD}=2", "generation.vllm_cfg.max_num_seqs=256"),
            *("generation.vllm_cfg.gpu_memory_utilization=0.25", "algorithm.loss_fn.force_on_policy_ratio=false"),
            *("offload=none", f"{PACKS}.train_mb_tokens=16384", f"{PACKS}.logprob_mb_tokens=16384"),
            *(f"{MEGATRON}.keep_logits=false", "generation.colocated.sleep=true"),
            "+generation.vllm_kwargs.moe_backend=triton",
        ],
        {
            "the launcher's": [],
            "without grouped GEMM": [f"{MEGATRON}.moe_grouped_gemm=false"],
            "EP 1 (data parallel)": [f"{SPREAD}=1"],
            "engine TP 2": ["generation.vllm_cfg.tensor_parallel_size=2"],
        },
        [*RATES, *PHASES, *REFITS, *SHARES, *MISMATCH, *MEMORY],
    ),
    "precision": Comparison(
        "engine-precision-{model}",
        LARGE,
        {
            "bfloat16": [],
            **{
                f"fp8_per_{scale}": [f"+generation.vllm_kwargs.quantization=fp8_per_{scale}"]
                for scale in ("tensor", "channel", "block")
            },
        },
        [*MISMATCH, *RATES, *PHASES, *MEMORY],
    ),
    "async_1": Comparison(
        "async-rate",
        ASYNC,
        {
            "sync, engine sleeps": [*SHARED, "generation.colocated.sleep=true"],
            "sync, engine awake": [*SHARED, AWAKE],
            "one step off, engine awake": [*SHARED, AWAKE, *ONE_STEP_OFF],
            "queue, staleness 2, engine awake": [*SHARED, AWAKE, *QUEUE],
        },
        AHEAD_QUANTITIES,
        warm=2,
    ),
    "async_2": Comparison(
        "async-rate",
        ASYNC,
        {
            "sync, 1 + 1 GPUs": APART,
            "one step off, 1 + 1 GPUs": [*APART, *ONE_STEP_OFF],
            "queue, staleness 2, 1 + 1 GPUs": [*APART, *QUEUE],
            "sync, colocated": [
                *(*TWO, "generation.vllm_cfg.gpu_memory_utilization=0.4", "generation.colocated.sleep=true"),
            ],
        },
        AHEAD_QUANTITIES,
        _async_bars,
        warm=2,
    ),
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=6, help="that count")
    parser.add_argument("--only", nargs="+", metavar="WAY")
    parser.add_argument("--record", help="the name of the record, where it is to be another")
    parser.add_argument("--other", metavar="NAME=PATH:...", help="a checkout, and folders with packages")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    compared = COMPARISONS[given.comparison]
    if unknown := set(given.only or ()) - compared.ways.keys():
        parser.error(f"--only {', '.join(unknown)}: there are {', '.join(compared.ways)}")
    own = [*compared.task, *STEPS_ALONE, model_key(given.model)]
    if given.comparison.startswith("async"):
        own += _stops(given.model)
    results: list[dict[str, Any]] = []
    other, _, paths = (given.other or "").partition("=")
    runs = [(way, way, []) for way in given.only or compared.ways]
    if other:
        runs = [run for way, _, _ in runs for run in ((f"{way}, {other}", way, paths.split(":")), (way, way, []))]
    for name, way, there in runs:
        overrides = [*own, *compared.ways[way], *given.overrides]
        # Rollouts that are made ahead fill their queue in two more steps, and use it up in the last two.
        filled = 2 if any(one.startswith("algorithm.rollouts.source=") for one in overrides) else 0
        warm = compared.warm + filled
        steps, first_s = one_run(
            [*overrides, f"algorithm.max_num_steps={warm + given.steps + filled}"], warm, filled, there
        )
        for line in steps:
            line[WHOLE_RATE] = line["train/global_valid_toks"] / line[STEP]
        results.append(record.result("command to first step", name, "s", [first_s]))
        results += results_of(steps, name, compared.quantities)
        medians: Medians = {}
        for one in results:
            medians.setdefault(one["config"], {})[one["name"]] = one["median"]
        print(name, {one: float(f"{value:.4g}") for one, value in medians[name].items()}, flush=True)
        kept = given.record or compared.record.format(model=given.model.name)
        print(record.write(kept, results, compared.bars(medians), f"model: {given.model.name}"), flush=True)


def _stops(model: Path) -> list[str]:
    """Return the override of so many end tokens that a random model's response has 200 tokens on average."""
    vocabulary = find_shape(str(model)).vocabulary
    return [f"generation.stop_token_ids={list(range(1000, 1000 + vocabulary // 200))}".replace(" ", "")]


def trial() -> None:
    with tried():
        for name in COMPARISONS:
            model = KNOWN_EXPERTS if name in ("router_replay", "experts") else KNOWN_MODEL
            main([name, model, "--steps", "2"])
        main(["speed", KNOWN_MODEL, "--steps", "2", "--only", "fast scheduler", "--other", "before=/before:/packages"])


if __name__ == "__main__":
    record.start(main, trial)
