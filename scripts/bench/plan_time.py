"""Compare the seconds that `nrl-lite plan` predicts for a step with those of recorded runs: plan_time.py

The runs are those of gpu_run.py in docs/benchmarks/runs/ with three steps or more, of which the first is left out. Each
is predicted from its configuration and from the lengths that its sequences had. The newest lines of speed-ablation are
added, and three records without phases: the tokens a second of rollouts-rate and rollouts-engine-paths, on the
sequences of the run with the same sizes, those of sft-throughput, with chats as long as in the SFT runs, and those of
context-rate.
"""

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import record
import whole_runs
from plan_check import GPU_MIB, RUNS, config_of, shape_of
from speed_ablation import PACKS, SMALL

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import samples_per_step, sequences_per_optimizer_step
from nemo_rl_lite.planning.gpus import speed_of
from nemo_rl_lite.planning.time import Lengths, optimizer_step_seconds, predict_step
from nemo_rl_lite.rules.compose import compose_config

PHASES = {
    "generation": ("generation",),
    "logprob": ("policy_and_reference_logprobs",),
    "train": ("policy_training",),
    "refit": ("prepare_for_generation/transfer_and_update_weights", "refit_check"),
    "whole step": ("total_step_time",),
}
# The share of runs that should be predicted within this factor.
FACTOR, WANTED = 1.5, 0.9
SAME_SIZES, RATES = "qwen3-1.7b-colocated", {"rollouts-rate": "generation, now", "rollouts-engine-paths": "stepped"}
# sft_throughput.py's chats of a step, and the tokens of a micro-batch.
CHATS, THROUGHPUT = 128, {"qwen3-1.7b": 4096, "smollm2-135m-instruct": 16384}
# Lines of speed-ablation by the end of their record's name: the shape of the model, what `auto` had settled or the line
# sets, on top of the task, and lengths.
_LARGE = [*whole_runs.LARGE, f"{PACKS}.train_mb_tokens=18048", "generation.vllm_cfg.gpu_memory_utilization=0.5"]
_SMALL = [*SMALL, f"{PACKS}.train_mb_tokens=65536", "generation.colocated.sleep=false"]
_OF_LARGE, _OF_SMALL = ("qwen3-1.7b", Lengths(34, 512, 512)), ("smollm2-135m-instruct", Lengths(46, 22, 32))
ABLATIONS = {
    ("large-scheduler", "a short way through the scheduler"): (*_OF_LARGE, _LARGE),
    ("large-kept", "logits kept"): (*_OF_LARGE, _LARGE),
    ("small-graphs", "a short way through the scheduler"): (*_OF_SMALL, _SMALL),
    ("small-graphs", "CUDA graphs of the training step"): (*_OF_SMALL, _SMALL),
}
# context_rate.py's lengths, and its model.
CONTEXT, CONTEXT_MODEL = (16384, 65536), "qwen3-0.6b"
Compared = tuple[str, str, float, float]
"""Phase, run, predicted and measured seconds."""


def main() -> None:
    found = [*(row for run in runs() for row in of_run(run)), *of_rollout_rates(), *of_supervised_rates()]
    found += [*of_ablations(), *of_context_rates()]
    results, bars = [], []
    for phase in PHASES:
        rows = [row for row in found if row[0] == phase]
        ratios = [predicted / measured for _, _, predicted, measured in rows]
        for _, name, predicted, measured in rows:
            results.append(record.result(f"{phase}: predicted", name, "s", [predicted]))
            results.append(record.result(f"{phase}: measured", name, "s", [measured]))
        results.append(record.result(f"{phase}: predicted over measured", "all runs", "", ratios))
        within = statistics.mean(1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
        bars.append(record.bar(f"{phase}: share of runs within a factor of {FACTOR:g}", within, WANTED, at_least=True))
        print(f"{phase:12s} median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    note = "The moves of offload presets are in measured refits and whole steps, and in no prediction."
    record.write("plan-time-against-measured", results, bars, note)


def runs() -> Iterator[dict[str, Any]]:
    """Yield the recorded runs that trained for three steps or more."""
    for path in sorted(RUNS.glob("*.json")):
        run = json.loads(path.read_text())
        if not run["exit_status"] and len(run["series"].get("timing/train/policy_training", ())) >= 3:
            yield run


def of_run(run: dict[str, Any]) -> Iterator[Compared]:
    """Yield the phases of one run."""
    config, nbytes, name = config_of(run), memory_of(run), f"{run['name']}, {run['hardware']['name']}"
    measured = {
        phase: sum(median(run, f"timing/train/{timer}") for timer in timers) for phase, timers in PHASES.items()
    }
    shape = shape_of(config.policy.model_name)
    if generates(config):
        time = predict_step(config, shape, nbytes, lengths_of(run))
        predicted = dataclasses.asdict(time) | {"whole step": time.in_turn}
    else:
        chat = median(run, "train/total_num_tokens") / sequences_per_optimizer_step(config)
        lengths = Lengths(0, chat, config.policy.max_total_sequence_length)
        predicted = {"train": optimizer_step_seconds(config, shape, speed_of(nbytes)[1], lengths)}
    for phase, seconds in predicted.items():
        yield phase, name, seconds, measured[phase]


def of_rollout_rates() -> Iterator[Compared]:
    """Yield the generation phase of records that have tokens a second alone."""
    run = next(one for one in runs() if one["name"] == SAME_SIZES)
    config, lengths = config_of(run), lengths_of(run)
    time = predict_step(config, shape_of(config.policy.model_name), memory_of(run), lengths)
    for bench, name in RATES.items():
        seconds = samples_per_step(config) * lengths.mean / rate_of(f"{bench}-1x-h100", name)
        yield "generation", f"{bench}, 1x-h100", time.generation, seconds


def of_supervised_rates() -> Iterator[Compared]:
    """Yield the training of records of SFT that have tokens a second alone."""
    run = next(one for one in runs() if one["name"] == "sft-gsm8k-epoch")
    config = config_of(run)
    chat = median(run, "train/total_num_tokens") / sequences_per_optimizer_step(config)
    for model, tokens in THROUGHPUT.items():
        lengths = Lengths(0, chat, config.policy.max_total_sequence_length)
        one = optimizer_step_seconds(with_batch(config, tokens), shape_of(model), speed_of(memory_of(run))[1], lengths)
        yield (
            "train",
            f"sft-throughput-{model}, 1x-h100",
            one,
            CHATS * chat / rate_of(f"sft-throughput-{model}-1x-h100", "tokens a second and device"),
        )


def of_ablations() -> Iterator[Compared]:
    """Yield the phases of the lines of speed-ablation."""
    gpu = GPU_MIB["h100"] * 2**20
    for (bench, line), (model, lengths, overrides) in ABLATIONS.items():
        config = composed(overrides)
        time = predict_step(config, shape_of(model), gpu, lengths)
        predicted = dataclasses.asdict(time) | {"whole step": time.in_turn}
        rows = json.loads((record.FOLDER / f"speed-ablation-{bench}-1x-h100.json").read_text())["results"]
        measured = {row["name"]: row["median"] for row in rows if row["config"] == line}
        for phase, *_ in whole_runs.PHASES:
            # A logprob phase without a pass sends rows to the workers.
            if predicted[phase]:
                yield phase, f"speed-ablation-{bench}, {line}", predicted[phase], measured[phase]


def of_context_rates() -> Iterator[Compared]:
    """Yield the training on single long sequences."""
    rows = json.loads((record.FOLDER / f"context-rate-{CONTEXT_MODEL}-1x-h100.json").read_text())["results"]
    for tokens in CONTEXT:
        rate = next(row["median"] for row in rows if row["config"] == f"{tokens} tokens")
        config = composed(
            [
                *("algorithm=sft", "policy=megatron_gpu", "cluster.gpus_per_node=1"),
                *("policy.train_global_batch_size=1", f"policy.max_total_sequence_length={tokens}"),
                *(f"{PACKS}.train_mb_tokens={tokens}", "policy.megatron_cfg.activation_checkpointing=true"),
            ]
        )
        gpu = speed_of(GPU_MIB["h100"] * 2**20)[1]
        seconds = optimizer_step_seconds(config, shape_of(CONTEXT_MODEL), gpu, Lengths(0, tokens, tokens))
        yield "train", f"context-rate-{CONTEXT_MODEL}, {tokens} tokens", seconds, tokens / rate


def composed(overrides: Sequence[str]) -> Config:
    """Return the configuration for a model of the hub, whose shape is given otherwise."""
    return compose_config([*overrides, "policy.model_name=organisation/model"])


def with_batch(config: Config, tokens: int) -> Config:
    """Return `config` with steps of `CHATS` chats and micro-batches of `tokens` tokens."""
    packing = dataclasses.replace(config.policy.sequence_packing, train_mb_tokens=tokens)
    policy = dataclasses.replace(config.policy, sequence_packing=packing, train_global_batch_size=CHATS)
    return dataclasses.replace(config, policy=policy)


def lengths_of(run: dict[str, Any]) -> Lengths:
    names = ("mean_prompt_length", "mean_gen_tokens_per_sample", "max_gen_tokens_per_sample")
    return Lengths(*(median(run, f"train/{name}") for name in names))


def median(run: dict[str, Any], metric: str) -> float:
    """Return the median over the steps after the first; 0 for a metric that the run does not have."""
    return statistics.median([value for _, value in run["series"].get(metric, [(0, 0), (0, 0)])[1:]])


def memory_of(run: dict[str, Any]) -> int:
    return GPU_MIB[run["hardware"]["name"].split("-")[1]] * 2**20


def rate_of(file: str, name: str) -> float:
    """Return the median of a quantity in a record; the first of its settings is this package's."""
    rows = json.loads((record.FOLDER / f"{file}.json").read_text())["results"]
    return next(row["median"] for row in rows if row["name"] == name)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    main()
