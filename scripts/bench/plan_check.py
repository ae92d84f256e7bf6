"""Compare the predictions of `nrl-lite plan` with runs on GPUs: plan_check.py {memory|time}

The runs are those of runs.py in docs/benchmarks/runs/ that trained for three steps or more.

Memory: a plan assumes full micro-batches. Packs have nearly equal length, so the fullest pack follows from the tokens
of a step, and the plan is made for that. The script compares the allocator's peak in the policy's training phase, and
the use of a policy rank's whole GPU in the phase with the highest peak.

Time: each run is predicted from its configuration and from the lengths that its sequences had, and compared with the
medians of its steps after the first. `RECORDS` are compared in the same way. The constants of planning/time.py fit some
of them, and the others are held out. `GRID` has splits of the same GPUs, of which the plan should choose the fastest.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import published_row
import random_model
import record
import rollout_rate
import shared_prompts
import training
import ways

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import parallel_dims, samples_per_step, sequences_per_optimizer_step
from nemo_rl_lite.models.shape import ModelShape, model_shape
from nemo_rl_lite.offload.residency import Phase, Residency
from nemo_rl_lite.planning import memory, time
from nemo_rl_lite.planning.automatic import resolve_auto
from nemo_rl_lite.planning.budget import budget, speed_of
from nemo_rl_lite.planning.lengths import Lengths
from nemo_rl_lite.planning.memory import micro_batch
from nemo_rl_lite.planning.splits import GpuSplits
from nemo_rl_lite.planning.time import generation_seconds, optimizer_step_seconds, predict_step
from nemo_rl_lite.validation.compose import compose_config, restore

RUNS = record.FOLDER / "runs"
GIB = 2**30
TOLERANCE = 0.1
# The runs and records had a prompt in each row.
ALONE = "policy.sequence_packing.shared_prompts=false"
# Engines of all runs, and of most records, decoded by vLLM's kernels, and their hosts took longer per token.
BACKEND, VLLM = "attention_backend", "FLASH_ATTN"
VLLM_KERNELS = partial(patch.multiple, time, TOKEN_S=1.7e-5, OWN_SAMPLE_S=time.SAMPLE_S)
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# Memory that the driver reports, in MiB.
GPU_MIB = {"h100": 81559, "h200": 143771}
POLICY, WHOLE = "memory/policy_peak_bytes/", "memory/device_bytes/"
# Supervised runs without growing segments of torch, refits between GPUs with one buffer, and runs that did not trim the
# cache between phases.
EARLIER = {
    "sft-gsm8k",
    "sft-gsm8k-lora",
    "qwen3-1.7b-noncolocated-1-1",
    "qwen3-1.7b-noncolocated-tp2-tp2",
    "grpo-gsm8k",
}
TRAINED = "memory/policy_peak_bytes/train"


FACTOR, WANTED = 1.5, 0.9
"""The share of runs that should be predicted within this factor."""
PHASES = {
    "generation": ("generation",),
    "logprob": ("policy_and_reference_logprobs",),
    "train": ("policy_training",),
    "refit": ("prepare_for_generation/transfer_and_update_weights", "refit_check"),
    "step time": ("total_step_time",),
}
SECONDS = ("generation", "logprob", "train")
HELD_OUT_ERROR, CHOICE_ERROR = 0.15, 0.05
# Shortest phase that is compared.
MUCH_S = 0.1


@dataclass(frozen=True)
class Recorded:
    """A setting of a record in docs/benchmarks."""

    record: str
    setting: str
    overrides: Sequence[str]
    model: str
    """Name in random_model.py."""
    lengths: Lengths
    fitted: bool = False
    """Constants of planning/time.py fit it."""
    names: Mapping[str, str] = MappingProxyType({})
    """The record's name of a phase, where it has another."""
    sampled: int = 0
    """Tokens that the record's engine samples: it has no policy, and a throughput instead of seconds."""
    kind: str = "dense"
    """Group of the record: `experts`, or what the prediction leaves out."""
    own_kernels: bool = False
    """True if the engine sampled by the launcher's kernel, and had its attention unless the setting has another one."""

    def measured(self, quantity: str) -> float | None:
        results = json.loads((record.FOLDER / f"{self.record}.json").read_text())["results"]
        found = {one["name"]: one["median"] for one in results if one["config"] == self.setting}
        if self.sampled and quantity == "generation":
            return self.sampled / found["throughput"]
        return found.get(self.names.get(quantity, quantity))

    def predicted(self) -> dict[str, float]:
        """Return seconds by phase, and of the step."""
        with nullcontext() if self.own_kernels else VLLM_KERNELS():
            return self._predicted()

    def _predicted(self) -> dict[str, float]:
        shape = model_shape(random_model.model_config(self.model).to_dict())
        known = "Qwen/Qwen3-30B-A3B" if shape.experts else published_row.PUBLISHED
        backend = [f"++generation.vllm_kwargs.{BACKEND}={VLLM}"] * (not self.own_kernels)
        config = compose_config([*backend, ALONE, *self.overrides, f"policy.model_name={known}"])
        nbytes = GPU_MIB[self.record.rpartition("-")[2]] * 2**20
        if not generates(config):
            return {"train": optimizer_step_seconds(config, shape, speed_of(nbytes)[1], self.lengths)}
        if self.sampled:
            return {"generation": generation_seconds(config, shape, speed_of(nbytes)[1], nbytes, self.lengths)}
        split = GpuSplits(config, shape, nbytes, self.lengths).present
        return {phase: getattr(split.time, phase) for phase in SECONDS} | {"step time": split.seconds}


def _published(gpus: int, layers: int, hardware: str, fitted: bool, rollouts: str = "sync") -> Recorded:
    name = f"{published_row.record_name(gpus, 512, rollouts)}-{gpus}x-{hardware}"
    overrides, lengths = published_row.settings(gpus, 512, rollouts), Lengths(126, 795, 3840)
    return Recorded(name, "measured", overrides, f"llama3.1-8b:{layers}", lengths, fitted)


def _way(
    name: str, comparison: str, way: str, model: str, lengths: Lengths, setting: str = "", **others: Any
) -> Recorded:
    compared = ways.COMPARISONS[comparison]
    return Recorded(name, setting or way, [*compared.task, *compared.ways[way]], model, lengths, **others)


def _engine(name: str, model: str, prompt: int, tokens: int, sequences: int, setting: str, **others: Any) -> Recorded:
    """Return a record of rollout_rate.py."""
    samples = rollout_rate.SAMPLES
    sizes = [f"algorithm.num_prompts_per_step={sequences // samples}", f"generation.max_new_tokens={tokens}"]
    sizes += [f"algorithm.num_generations_per_prompt={samples}", f"generation.vllm_cfg.max_num_seqs={sequences}"]
    sizes += [f"policy.max_total_sequence_length={prompt + tokens}", f"policy.train_global_batch_size={sequences}"]
    lengths = Lengths(prompt, tokens, tokens)
    overrides = [*rollout_rate.GPU, *rollout_rate.SETTINGS.get(setting, []), *sizes]
    return Recorded(name, setting, overrides, model, lengths, sampled=sequences * tokens, **others)


def _training(name: str, comparison: str, way: str, model: str, *more: str, **others: Any) -> Recorded:
    """Return a record of training.py, with `more` overrides."""
    overrides = [one for one in training.COMPARISONS[comparison].task(way) if not one.startswith("data.")] + [*more]
    # Mean length of its chats, by the FLOPs of a recorded step.
    return Recorded(name, way, overrides, model, Lengths(0, 2230, 4096), **others)


def _shared_prompts(setting: str) -> Recorded:
    given = argparse.Namespace(
        model=Path(published_row.PUBLISHED), prompts=64, samples=8, prompt=2048, response=512, mb_tokens=12800
    )
    overrides = [*shared_prompts.overrides(given, shared_prompts.WAYS[setting]), *ways.ONE_GPU]
    kind = "shared prompts" if setting == "shared prompts" else "dense"
    name, names = "shared-prompts-qwen3-1.7b-1x-h200", {"train": "training time"}
    return Recorded(name, setting, overrides, "qwen3-1.7b", Lengths(2048, 512, 512), names=names, kind=kind)


def _experts(*arguments: Any, **others: Any) -> Recorded:
    """Return a record of `_way` with vLLM's first model runner, which router replay still has. Its policy launched a
    GEMM for each expert, so only generation counts."""
    one = _way(*arguments, kind="experts", names=dict.fromkeys(("logprob", "train", "step time"), ""), **others)
    return dataclasses.replace(one, overrides=[*one.overrides, "policy.router_replay.enabled=true"])


# Random models answer the default task, whose prompts have about 10 tokens.
LONG, MIDDLE, SHORT = Lengths(10, 512, 512), Lengths(10, 256, 256), Lengths(10, 190, 512)
REPLAY = "experts-router-replay-qwen3-moe-1.5b-1x-h100"
_decoding = partial(_engine, prompt=rollout_rate.PROMPT_TOKENS, sequences=512, setting="the launcher's")


def _prompts(name: str = "decode-512-prompts-2048-1x-h200", **others: Any) -> Recorded:
    return _engine(name, "qwen3-1.7b", 2048, 512, sequences=512, kind="prompts of 2,048", **others)


# The packs of this run, by its note.
SMALL_PACKS = [f"{ways.PACKS}.{phase}_mb_tokens=4096" for phase in ("train", "logprob")]
SMALL_BATCH = "policy.train_global_batch_size=16"
RECORDS = [
    _published(1, 8, "h100", fitted=True),
    _published(2, 16, "h100", fitted=True),
    _published(2, 8, "h100", fitted=False, rollouts="one step off"),
    _published(4, 32, "h200", fitted=False),
    _published(1, 8, "h200", fitted=False),
    _published(1, 8, "h200", fitted=False, rollouts="partial"),
    _way("plane-step-1x-h200", "speed", "fast scheduler", "qwen3-1.7b", LONG, "now", fitted=True),
    _way("rollout-workers-large-1x-h200", "rollout_workers", "0 rollout workers", "qwen3-1.7b", LONG, fitted=True),
    _way("engines-versions-1x-h100", "speed", "fast scheduler", "qwen3-1.7b", LONG),
    _way("speed-ablation-large-1x-h200", "speed", "fast scheduler", "qwen3-1.7b", LONG),
    _way("peers-search-1.7b-1x-h200", "speed", "fast scheduler", "qwen3-1.7b", LONG, "nemo_rl_lite"),
    _decoding("engine-settings-1x-h100", "qwen3-1.7b", tokens=512, setting="default"),
    # By its trace.
    _decoding("decode-qwen3-1.7b-1x-h200", "qwen3-1.7b", tokens=512, fitted=True),
    _decoding("decode-512-1x-h200", "qwen3-1.7b", tokens=512, fitted=True, own_kernels=True),
    _decoding("decode-512-1x-h200", "qwen3-1.7b", tokens=512, setting="vLLM's attention", own_kernels=True),
    _decoding("decode-64-1x-h200", "qwen3-1.7b", tokens=512, sequences=64, fitted=True, own_kernels=True),
    _decoding("decode-llama3.1-8b-1x-h200", "llama3.1-8b", tokens=512, own_kernels=True),
    _prompts("decode-512-prompts-2048-own-kernels-1x-h200", setting="the launcher's", own_kernels=True),
    _prompts(setting="the launcher's", fitted=True),
    _prompts(setting="cascade attention"),
    _prompts(setting="cascade attention in one split"),
    _decoding("decode-llama3.1-8b-8-1x-h200", "llama3.1-8b:8", tokens=512, kind="8 layers, no policy"),
    _decoding("decode-qwen3-30b-a3b-1x-h200", "qwen3-30b-a3b", tokens=256, kind="experts, no policy"),
    _way("lora-refit-large-1x-h100", "lora", "merged, rank 16", "qwen3-1.7b", LONG, kind="adapters"),
    _way("lora-next-to-trl-large-1x-h100", "lora", "adapters, rank 16", "qwen3-1.7b", LONG, kind="adapters"),
    _way(
        "peers-lora-1.7b-1x-h200",
        "lora",
        "adapters, rank 16",
        "qwen3-1.7b",
        LONG,
        "nemo_rl_lite",
        kind="adapters",
        fitted=True,
        own_kernels=True,
    ),
    Recorded(
        "async-rate-1x-h100",
        "sync, engine sleeps",
        [*ways.ASYNC, *SMALL_PACKS, "generation.vllm_cfg.gpu_memory_utilization=0.3"],
        "qwen3-1.7b",
        SHORT,
        names={"generation": "policy idle"},
        kind="759 stop tokens",
    ),
    *map(_shared_prompts, shared_prompts.WAYS),
    _experts("experts-rate-2x-h100", "experts", "the launcher's", "qwen3-30b-a3b:4", LONG, "default", fitted=True),
    _experts("experts-rate-2x-h100", "experts", "EP 1 (data parallel)", "qwen3-30b-a3b:4", LONG, fitted=True),
    _experts(REPLAY, "router_replay", "without replay", "qwen3-moe-1.5b", MIDDLE),
    _experts(REPLAY, "router_replay", "with replay", "qwen3-moe-1.5b", MIDDLE),
    _training("experts-training-1x-h200", "experts", "packs of 32,768", "qwen3-30b-a3b:8", kind="experts", fitted=True),
    _training("training-experts-1x-h200", "experts", "packs of 32,768", "qwen3-30b-a3b:8", kind="experts"),
    _training("training-experts-packs-1x-h200", "experts", "packs of 32,768", "qwen3-30b-a3b:8", kind="experts"),
    _training("training-experts-fewer-waits-1x-h200", "experts", "packs of 40,960", "qwen3-30b-a3b:8", kind="experts"),
    _training(
        "training-expert_parallel-2x-h200", "expert_parallel", "packs of 16,384", "qwen3-235b-a22b:4", kind="experts"
    ),
    _training("training-fusion-1x-h200", "fusion", "gradient accumulation fusion", "qwen3-1.7b"),
    _training("training-precision-16-1x-h200", "precision", "bfloat16", "llama3.1-8b:16", SMALL_BATCH),
    _training(
        "training-precision-24-1x-h200",
        "precision",
        "bfloat16",
        "llama3.1-8b:24",
        SMALL_BATCH,
        *training.MOMENTS.overrides,
    ),
    *(
        _training("training-tensor-2x-h200", "tensor", way, "llama3.1-70b:4", kind="tensor parallel")
        for way in ("no recomputation", "MLPs recomputed")
    ),
    *(
        _training("training-layouts-2x-h200", "layouts", way, "llama3.1-8b:16", kind=kind)
        for way, kind in (
            ("data parallel", "dense"),
            ("tensor parallel", "tensor parallel"),
            ("pipeline", "pipeline"),
            ("pipeline, packs of 8,192", "pipeline"),
            ("pipeline, a layer less in the last stage", "pipeline"),
        )
    ),
    _way("peers-1.7b-1x-h200", "speed", "fast scheduler", "qwen3-1.7b", LONG, "nemo_rl_lite", own_kernels=True),
]
GRID = [
    _way("async-rate-2x-h200", "async_2", "sync, 1 + 1 GPUs", "qwen3-1.7b", SHORT),
    _way("async-rate-2x-h200", "async_2", "one step off, 1 + 1 GPUs", "qwen3-1.7b", SHORT),
    _way("async-rate-colocated-2x-h200", "async_2", "sync, colocated", "qwen3-1.7b", SHORT),
]
Compared = tuple[str, str, float, float]
"""Phase, run, predicted and measured seconds."""


def main(arguments: list[str]) -> None:
    match arguments:
        case ["memory"]:
            check_memory(list(runs()))
        case ["time"]:
            check_time(list(runs()))
        case _:
            sys.exit(__doc__)


def runs() -> Iterator[dict[str, Any]]:
    """Yield the recorded runs that trained for three steps or more."""
    for path in sorted(RUNS.glob("*.json")):
        run = json.loads(path.read_text())
        if not run["exit_status"] and len(run["series"].get("timing/train/policy_training", ())) >= 3:
            yield run


def check_memory(found: Sequence[dict[str, Any]]) -> None:
    """Write the record of the memory."""
    results, worst = [], {"policy, train": 0.0, "whole GPU": 0.0}
    for run in found:
        if run["name"] in EARLIER or TRAINED not in run["series"]:
            continue
        for what, (planned, measured) in compared(run).items():
            error = planned / measured - 1
            worst[what] = max(worst[what], abs(error))
            name = f"{run['name']}, {run['hardware']['name']}"
            results.append(record.result(f"{what}: planned", name, "GiB", [planned / GIB]))
            results.append(record.result(f"{what}: measured", name, "GiB", [measured / GIB]))
            results.append(record.result(f"{what}: error", name, "share", [error]))
            print(f"{name:45s} {what:14s} {planned / GIB:6.1f} {measured / GIB:6.1f} {error:+.1%}")
    bars = [
        record.bar(f"{what}: largest error of a run", value, TOLERANCE, at_least=False) for what, value in worst.items()
    ]
    record.write("plan-against-measured", results, bars)


def check_time(found: Sequence[dict[str, Any]]) -> None:
    """Write the record of the seconds."""
    compared_phases, results, bars = [row for run in found for row in of_run(run)], [], []
    for phase in PHASES:
        rows = [row for row in compared_phases if row[0] == phase]
        if not rows:
            continue
        ratios = [predicted / measured for _, _, predicted, measured in rows]
        for _, name, predicted, measured in rows:
            results.append(record.result(f"{phase}: predicted", name, "s", [predicted]))
            results.append(record.result(f"{phase}: measured", name, "s", [measured]))
        results.append(record.result(f"{phase}: predicted over measured", "all runs", "", ratios))
        within = statistics.mean(1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
        bars.append(record.bar(f"{phase}: share of runs within a factor of {FACTOR:g}", within, WANTED, at_least=True))
        print(f"{phase:12s} median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    more, more_bars = records_and_choice()
    results, bars = results + more, bars + more_bars
    note = "The moves of offload presets are in measured refits and step times, and in no prediction."
    record.write("plan-time-against-measured", results, bars, note)


def records_and_choice() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compare `RECORDS`, and the plan's choice of `GRID` with the fastest of it. Return results and bars."""
    results, bars, errors = [], [], dict[tuple[str, str], list[float]]()
    for one in RECORDS:
        use, name = "fitted" if one.fitted else "held out", f"{one.record}, {one.setting}"
        for phase, seconds in one.predicted().items():
            # In an asynchronous run the policy hardly waits, and some records have no separate logprob pass.
            if (measured := one.measured(phase)) and seconds > MUCH_S and measured > MUCH_S:
                results.append(record.result(f"{phase}: predicted", f"{name} ({use})", "s", [seconds]))
                results.append(record.result(f"{phase}: measured", f"{name} ({use})", "s", [measured]))
                errors.setdefault((phase, f"{one.kind}, {use}"), []).append(seconds / measured)
                print(f"{name:70s} {use:9s} {phase:10s} {seconds:6.2f} {measured:6.2f} {seconds / measured:5.2f}")
    for (phase, group), ratios in errors.items():
        results.append(record.result(f"{phase}: predicted over measured", group, "", ratios))
        if group.endswith("held out"):
            error = max(abs(ratio - 1) for ratio in ratios)
            bars.append(record.bar(f"{phase}, {group}: largest error", error, HELD_OUT_ERROR, at_least=False))
    seconds = {one.setting: one.measured("step time") or 0.0 for one in GRID}
    planned = {one.setting: one.predicted()["step time"] for one in GRID}
    chosen = min(planned, key=lambda setting: planned[setting])
    ratio = seconds[chosen] / min(seconds.values())
    results.append(record.result("step time of the chosen split over the fastest", chosen, "", [ratio]))
    bars.append(record.bar("chosen split over the fastest, 2x-h200", ratio, 1 + CHOICE_ERROR, at_least=False))
    print("chosen:", chosen, f"{ratio:.3f}", {setting: round(own, 2) for setting, own in planned.items()})
    return results, bars


def fullest_pack(run: dict[str, Any], config: Config) -> int:
    """Return the tokens of the fullest micro-batch that a rank trained on."""
    series, limit = run["series"], micro_batch(config, training=True).tokens
    rates, times = series["performance/tokens_per_sec"], series["timing/train/total_step_time"]
    samples = samples_per_step(config) if generates(config) else sequences_per_optimizer_step(config)
    ranks_and_steps = parallel_dims(config).dp * samples / sequences_per_optimizer_step(config)
    tokens = [rate * seconds / ranks_and_steps for (_, rate), (_, seconds) in zip(rates, times, strict=True)]
    return int(max(one / ceil(one / limit) for one in tokens))


def compared(run: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return planned and measured bytes by quantity."""
    config, gpu = config_of(run), GPU_MIB[run["hardware"]["name"].split("-")[1]] * 2**20
    if "sleep" in run["config"].get("generation", {}).get("colocated", {}):
        # Keys of this run may be `auto`.
        config = resolve_auto(config, shape_of(config.policy.model_name), gpu).config
    policy = config.policy
    packing = dataclasses.replace(policy.sequence_packing, train_mb_tokens=fullest_pack(run, config))
    as_packed = dataclasses.replace(config, policy=dataclasses.replace(policy, sequence_packing=packing))
    # Before this moment, a policy had all logits of a micro-batch at the same time.
    width = memory.VOCABULARY_SLICE if run["date"] > "2026-11-24T10:30" else 10**9
    with patch.object(memory, "VOCABULARY_SLICE", width):
        planned = budget(as_packed, shape_of(policy.model_name), gpu)
    shared = Residency.of(config).engines_share_device
    # Where engines have their own GPUs, the measurement of the generate phase is of those.
    phases = [
        phase
        for phase in planned.device
        if f"{WHOLE}{phase.value}" in run["series"] and (shared or phase is not Phase.GENERATE)
    ]
    return {
        "policy, train": (planned.policy[Phase.TRAIN], _most(run, TRAINED)),
        "whole GPU": (
            max(planned.device[phase] for phase in phases),
            max(_most(run, f"{WHOLE}{phase.value}") for phase in phases),
        ),
    }


def config_of(run: dict[str, Any]) -> Config:
    """Return the run's configuration; keys newer than the run have their defaults, or the behaviour before them."""
    name = run["config"]["algorithm"]["name"]
    before = [f"algorithm={name}", "refit.cuda_ipc=false", ALONE]
    if name == "grpo":
        before += ["algorithm.loss_fn.force_on_policy_ratio=false", f"++generation.vllm_kwargs.{BACKEND}={VLLM}"]
    whole = dataclasses.asdict(compose_config(before))
    return restore(json.dumps(_laid_over(whole, run["config"])))


def _laid_over(defaults: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for name, value in kept.items():
        # The key's name in older runs.
        key = "cuda_ipc" if name == "direct" else name
        if isinstance(value, dict) and isinstance(defaults.get(key), dict):
            merged[key] = _laid_over(defaults[key], value)
        elif key in defaults:
            merged[key] = value
    return merged


def shape_of(model_name: str) -> ModelShape:
    """Return the architecture of a run's model, by the name of its folder."""
    folder = Path(model_name)
    if "smollm2" in folder.name or folder.name == "hf":
        return model_shape(SMOLLM2)
    family, _, layers = folder.name.removesuffix("-layers").partition("b-")
    name = f"{family}b:{layers}" if layers else folder.name
    return model_shape(random_model.model_config(name).to_dict())


def of_run(run: dict[str, Any]) -> Iterator[Compared]:
    """Yield the phases of one run."""
    config, nbytes, name = config_of(run), memory_of(run), f"{run['name']}, {run['hardware']['name']}"
    measured = {
        phase: sum(median(run, f"timing/train/{timer}") for timer in timers) for phase, timers in PHASES.items()
    }
    shape = shape_of(config.policy.model_name)
    if generates(config):
        with VLLM_KERNELS():
            step = predict_step(config, shape, nbytes, lengths_of(run))
        predicted = {phase: getattr(step, phase) for phase in PHASES if phase != "step time"}
        predicted["step time"] = step.synchronous
    else:
        chat = median(run, "train/total_num_tokens") / sequences_per_optimizer_step(config)
        lengths = Lengths(0, chat, config.policy.max_total_sequence_length)
        predicted = {"train": optimizer_step_seconds(config, shape, speed_of(nbytes)[1], lengths)}
    for phase, seconds in predicted.items():
        yield phase, name, seconds, measured[phase]


def memory_of(run: dict[str, Any]) -> int:
    return GPU_MIB[run["hardware"]["name"].split("-")[1]] * 2**20


def lengths_of(run: dict[str, Any]) -> Lengths:
    names = ("mean_prompt_length", "mean_gen_tokens_per_sample", "max_gen_tokens_per_sample")
    return Lengths(*(median(run, f"train/{name}") for name in names))


def median(run: dict[str, Any], metric: str) -> float:
    """Return the median over the steps after the first; 0 for a metric that the run does not have."""
    return statistics.median([value for _, value in run["series"].get(metric, [(0, 0), (0, 0)])[1:]])


def _most(run: dict[str, Any], metric: str) -> float:
    return max(value for _, value in run["series"][metric])


def trial() -> None:
    """Compare one run of each kind."""
    some = [run for run in runs() if run["name"] in ("preset-pinned", "sft-gsm8k-epoch")]
    check_memory(some)
    check_time(some)


if __name__ == "__main__":
    record.start(main, trial)
