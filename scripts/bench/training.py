"""Compare settings of the training pass in SFT runs with random weights on one machine.

training.py COMPARISON MODEL [--steps 3] [--only WAY ...] [--record NAME] [-- OVERRIDE ...]

experts: qwen3-30b-a3b:8. Size of packs, kernels of routers, gradients added apart, a GEMM for each expert.
precision: llama3.1-8b:8. Matrix products in bfloat16 or FP8.
fusion: qwen3-1.7b. Gradients added in the GEMM, or apart.
layouts: llama3.1-8b:16, two GPUs. Data, tensor and pipeline parallel.
tensor: llama3.1-70b:4, two GPUs. Tensor parallel; what is recomputed, and FP8.
expert_parallel: qwen3-235b-a22b:4, two GPUs. Experts split over both.

MODEL is a folder with random weights (random_model.py). A step has 64 chats of 600 to 3,600 random words. The first two
steps do not count. The last is profiled and does not count either. The record has times of its longest kernels, and the
time without a kernel between its first and its last one. A record is written after each run.
"""

import argparse
import gzip
import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import record
from kernel_times import kernels
from whole_runs import (
    KNOWN_EXPERTS,
    KNOWN_MODEL,
    STEP,
    STEPS_ALONE,
    WORDS,
    Quantity,
    model_key,
    results_of,
    run_in,
    tried,
)

from nemo_rl_lite.observability.profiling import FOLDER, SUFFIX

WARM, ROWS, BATCH = 2, 512, 64
MEGATRON, PACKS = "policy.megatron_cfg", "policy.sequence_packing.train_mb_tokens"
TASK = [
    *("algorithm=sft", "policy=megatron_gpu", "policy.max_total_sequence_length=4096"),
    *(f"policy.train_global_batch_size={BATCH}", "algorithm.max_num_epochs=null", "offload=none"),
    *("data.name=file", "data.validation_split=null", "data.validation_fraction=0", *STEPS_ALONE),
]
QUANTITIES: list[Quantity] = [
    ("step time", "s", STEP, 1),
    ("train", "s", "timing/train/policy_training", 1),
    ("MFU of training", "share", "performance/train_fp_utilization", 1),
    ("policy's memory in training", "GiB", "memory/policy_peak_bytes/train", 2**30),
    ("loss", "nats", "train/loss", 1),
    ("tokens of a step", "", "train/total_num_tokens", 1),
]


@dataclass(frozen=True)
class Way:
    """Overrides, and environment variables of all processes."""

    overrides: list[str] = field(default_factory=list[str])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def __add__(self, other: "Way") -> "Way":
        return Way([*self.overrides, *other.overrides], {**self.environment, **other.environment})


@dataclass(frozen=True)
class Comparison:
    """Ways to train on this number of GPUs. A trial composes them with a known model of this name."""

    ways: Mapping[str, Way]
    known: str = KNOWN_MODEL
    gpus: int = 1

    def task(self, way: str) -> list[str]:
        return [*TASK, f"cluster.gpus_per_node={self.gpus}", *self.ways[way].overrides]


def cumulative(ways: dict[str, Way]) -> dict[str, Way]:
    return dict(zip(ways, accumulate(ways.values()), strict=True))


def recomputed(*modules: str) -> Way:
    chosen = f"{MEGATRON}.recompute_modules=[{','.join(modules)}]"
    return Way([f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.recompute_granularity=selective", chosen])


LONG, APART = Way([f"{PACKS}=16384"]), Way([f"{MEGATRON}.gradient_accumulation_fusion=false"])
EXPERTS_PACKS = Way([f"{PACKS}=32768"])
OPTIMIZER = f"{MEGATRON}.optimizer"
MOMENTS = Way(
    [
        f"{OPTIMIZER}.use_precision_aware_optimizer=true",
        *(f"{OPTIMIZER}.{moment}=bfloat16" for moment in ("exp_avg_dtype", "exp_avg_sq_dtype")),
    ]
)
FP8 = Way([f"{MEGATRON}.fp8_cfg.enabled=true"])
CUBLAS = Way(environment={"NVTE_USE_CUTLASS_GROUPED_GEMM": "0"})
ROUTER = Way([f"{MEGATRON}.moe_router_dtype=fp32", f"{MEGATRON}.moe_router_fusion=true"])
TENSOR = Way([f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.sequence_parallel=true"])
PIPELINE = Way([f"{MEGATRON}.pipeline_model_parallel_size=2"])
SPREAD = Way([f"{MEGATRON}.expert_model_parallel_size=2"])
COMPARISONS = {
    "experts": Comparison(
        cumulative(
            {
                "packs of 8,192": Way([f"{PACKS}=8192"]),
                "packs of 32,768": EXPERTS_PACKS,
                "packs of 40,960": Way([f"{PACKS}=40960"]),
                "router fusion": ROUTER,
            }
        )
        | {
            "packs of 32,768, gradients added apart": EXPERTS_PACKS + APART,
            "packs of 32,768, a GEMM for each expert": EXPERTS_PACKS + CUBLAS,
            "packs of 49,152, moments in bfloat16": Way([f"{PACKS}=49152"]) + MOMENTS,
        },
        KNOWN_EXPERTS,
    ),
    "precision": Comparison({"bfloat16": LONG, "FP8, blockwise": LONG + FP8}),
    "fusion": Comparison(
        {"gradient accumulation fusion": LONG, "gradients added apart": LONG + APART},
    ),
    "layouts": Comparison(
        {
            "data parallel": LONG,
            "tensor parallel": LONG + TENSOR,
            "pipeline": LONG + PIPELINE,
            "pipeline, packs of 8,192": Way([f"{PACKS}=8192"]) + PIPELINE,
            "pipeline, a layer less in the last stage": LONG
            + PIPELINE
            + Way([f"{MEGATRON}.num_layers_in_last_pipeline_stage=7"]),
        },
        "meta-llama/Llama-3.1-8B-Instruct",
        gpus=2,
    ),
    "tensor": Comparison(
        {
            "no recomputation": LONG + TENSOR,
            "attention recomputed": LONG + TENSOR + recomputed("core_attn"),
            "MLPs recomputed": LONG + TENSOR + recomputed("mlp"),
            "FP8, blockwise": LONG + TENSOR + FP8,
        },
        "meta-llama/Llama-3.1-70B-Instruct",
        gpus=2,
    ),
    "expert_parallel": Comparison(
        cumulative(
            {
                "packs of 16,384": LONG + SPREAD,
                "activations of experts recomputed": recomputed("moe_act"),
            }
        ),
        "Qwen/Qwen3-235B-A22B",
        gpus=2,
    ),
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=3, help="that count")
    parser.add_argument("--only", nargs="+", metavar="WAY")
    parser.add_argument("--record", help="the name of the record, where it is to be another")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    ways = COMPARISONS[given.comparison].ways
    if unknown := set(given.only or ()) - ways.keys():
        parser.error(f"--only {', '.join(unknown)}: there are {', '.join(ways)}")
    results: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for name in given.only or ways:
        try:
            results += measured(name, given)
        except SystemExit as error:
            failures[name] = str(error)[-2000:]
        more = {"overrides": given.overrides, "failures": failures}
        kept = given.record or f"training-{given.comparison}"
        print(record.write(kept, results, [], f"model: {given.model.name}", more), flush=True)


def measured(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a way. Return the results of its steps and the times of its kernels. Raises SystemExit: it failed."""
    comparison, last = COMPARISONS[given.comparison], WARM + given.steps + 1
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(f"{json.dumps(row)}\n" for row in chats()))
        own = [f"data.train_path={rows}", f"algorithm.max_num_steps={last}", f"profile.steps=[{last}]"]
        before = dict(os.environ)
        os.environ.update(comparison.ways[name].environment)
        try:
            run = Path(folder) / "run"
            steps = run_in(run, [*comparison.task(name), model_key(given.model), *own, *given.overrides])
        finally:
            os.environ.clear()
            os.environ.update(before)
        results = results_of(steps[WARM : WARM + given.steps], name, QUANTITIES)
        print(name, {one["name"]: float(f"{one['median']:.4g}") for one in results}, flush=True)
        return results + list(kernels((run / FOLDER).glob(f"*/policy*{SUFFIX}"), name))


def chats() -> Iterator[dict[str, Any]]:
    """Yield rows of random words."""
    chosen = random.Random(0)
    for _ in range(ROWS):
        question, answer = (" ".join(chosen.choices(WORDS, k=count)) for count in (100, chosen.randint(500, 3500)))
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def trial() -> None:
    """Compose each way, and read a trace of two kernels."""
    with tried():
        for name, comparison in COMPARISONS.items():
            main([name, comparison.known, "--steps", "1"])
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / f"policy-0{SUFFIX}"
        gemm = {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 1e6}
        events = [gemm | {"ts": 3e6}, {"ph": "M"}, gemm | {"ts": 0}]
        with gzip.open(trace, "wt") as opened:
            json.dump({"traceEvents": events}, opened)
        found = {(one["name"], one["unit"]): one["median"] for one in kernels([trace], "trial")}
        if found["kernel gemm", "s"] != 2 or found["all kernels", "launches"] != 2 or found["no kernel", "s"] != 2:
            raise SystemExit(f"kernels: {found}")


if __name__ == "__main__":
    record.start(main, trial)
