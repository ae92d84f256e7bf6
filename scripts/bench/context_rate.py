"""Tokens a second of training on single long sequences, by their length: context_rate.py MODEL

context_rate.py MODEL [--tokens 16384 65536] [--steps 7] [--context 1] [--ways p2p a2a ...] [--trace]
                [-- OVERRIDE ...]

Each optimizer step trains all weights on one chat of that many tokens, in bfloat16 with recomputed layers, as the rows
"RL full, recompute" of prime-rl's table of its trainer do, on one GPU; with `--context` 2 or more then on that many
GPUs that share each sequence, too, in each of the `--ways`. The first three steps do not count. `--trace` adds a step
to each run of several GPUs, which does not count either, and tells from rank 0's trace of it what its GPU and the host
did while it trained.
"""

import argparse
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import record
from trace_phase import Event, of_phase
from whole_runs import STEPS_ALONE, results_of, run_in

WARM = 3
# prime-rl's tokens a second for the shape of Qwen3-0.6B on one H100 (benchmarks/results/BENCHMARKS.md), by length.
TARGETS = {"qwen3-0.6b": {16384: 11_900, 65536: 10_200}}
# The share of N times one GPU's tokens a second that N GPUs are to reach.
PARALLEL = 0.85
OVERLAPPED = [
    f"policy.megatron_cfg.distributed_data_parallel_config.{key}=true"
    for key in ("overlap_grad_reduce", "overlap_param_gather")
]
WAYS = {
    "p2p": [],
    "a2a": ["policy.megatron_cfg.cp_comm_type=a2a"],
    "p2p-overlapped": OVERLAPPED,
    "a2a-overlapped": ["policy.megatron_cfg.cp_comm_type=a2a", *OVERLAPPED],
}
RATE = "tokens a second"
METRICS = [
    (RATE, "1/s", "performance/tokens_per_sec", 1),
    ("MFU", "share", "performance/train_fp_utilization", 1),
    ("memory at its peak", "GiB", "memory/policy_peak_bytes/train", 2**30),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[], help="in which GPUs share a sequence (p2p)")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    shared = given.context > 1
    if given.ways and not shared:
        parser.error("--ways needs --context of 2 or more")
    name = f"context-rate-{given.model.name}" + (f"-context-{given.context}" if shared else "")
    results, bars = [], []
    for tokens in given.tokens:
        rates = {}
        for way in ["one GPU", *((given.ways or ["p2p"]) if shared else [])]:
            gpus, own = (given.context, WAYS[way]) if way in WAYS else (1, [])
            case = f"{tokens} tokens" + (f", {way}" if shared else "")
            traced = given.trace and gpus > 1
            steps, trace = train(given.model, tokens, given.steps, gpus, traced, [*own, *given.overrides])
            found = results_of(steps, case, METRICS) + trace_results(trace, case)
            medians = {one["name"]: one["median"] for one in found}
            print(case, medians, flush=True)
            results += found
            rates[way] = medians[RATE]
            if way in WAYS:
                times, target = rates[way] / rates["one GPU"], PARALLEL * given.context
                what = f"times the tokens a second of one GPU, {tokens} tokens shared by {given.context}, {way}"
                bars.append(record.bar(what, times, target, at_least=True))
            record.write(name, results, bars)
        if not shared and (target := TARGETS.get(given.model.name, {}).get(tokens)):
            bars.append(record.bar(f"tokens a second, {tokens} tokens", rates["one GPU"], target, at_least=True))
            record.write(name, results, bars)


def train(
    model: Path, tokens: int, steps: int, context: int, traced: bool, overrides: list[str]
) -> tuple[list[dict[str, float]], list[Event]]:
    """The metrics of the steps that count, and the events of rank 0's trace of one more."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # Every " a" is a token; the chat template takes some more.
        row = json.dumps({"prompt": "Repeat a.", "answer": " a" * (tokens - 128)})
        every = steps + traced
        chats = folder / "chats.jsonl"
        chats.write_text("\n".join([row] * (every + 2)) + "\n")
        own = [
            *("algorithm=sft", "data=file", f"data.train_path={chats}", "data.validation_fraction=0"),
            *("policy=megatron_gpu", f"cluster.gpus_per_node={context}", f"policy.model_name={model.resolve()}"),
            *([f"policy.megatron_cfg.context_parallel_size={context}"] if context > 1 else []),
            *(f"policy.max_total_sequence_length={tokens}", "policy.train_global_batch_size=1"),
            *(f"policy.sequence_packing.train_mb_tokens={tokens}", "policy.megatron_cfg.activation_checkpointing=true"),
            *("algorithm.max_num_epochs=null", f"algorithm.max_num_steps={every}", *STEPS_ALONE),
        ]
        if not traced:
            return run_in(folder / "run", [*own, *overrides])[WARM:], []
        found = run_in(folder / "run", [*own, f"profile.steps=[{every}]", *overrides])
        (file,) = (folder / "run" / "profile").glob("step-*/policy-0.json.gz")
        with gzip.open(file) as opened:
            return found[WARM:steps], json.load(opened)["traceEvents"]


def trace_results(events: list[Event], case: str) -> list[dict[str, Any]]:
    """What a trace says of the training in its step."""
    found = of_phase("train", events).items() if events else []
    return [record.result(f"traced step: {name}", case, unit, [value]) for name, (unit, value) in found]


if __name__ == "__main__":
    main()
