"""NeMo-RL's published step of an 8 B model on 8 H100 GPUs, with random weights: what our step takes, or should take.

published_row.py MODEL [--gpus 8] [--batch 512] [--apart | --partial] [--steps 3] [--dry-run] [-- OVERRIDE ...]
published_row.py --predict
published_row.py forced MEAN SIGMA [OVERRIDE ...]

The row, of NeMo-RL 0.3: Llama-3.1-8B-Instruct, 64 prompts x 32 samples, batches of 512, sequences and packs of 4,096
tokens, pipeline parallel 2, KL penalty 0.01, 795 generated tokens a sample: 112 s = training 28, refit 5, generation
58, logprobs 18. How lengths are distributed is not published: here they are lognormal with sigma 1, cut at 3,840
tokens. Neither are the prompts' lengths; here they have about 130 tokens. `forced` trains as `nrl-lite train` does, but
each response ends at a length of its own: the N responses of a step have those of N even quantiles of a lognormal
distribution, with MEAN as their mean after the cut. Each step deals the same lengths to other responses.

MODEL: a folder with random weights, random_model.py llama3.1-8b[:LAYERS]. With weights, gradients and optimizer states,
80 GB hold 32 layers on four policy GPUs or more, 16 on two, 8 on one. Fewer GPUs than eight have a share of the prompts
and of the batch, so that a colocated engine always has 256 responses. `--apart`: half of the GPUs are for engines,
which are one step ahead. `--partial`: partial rollouts on shared GPUs. Trials on CPUs: `--gpus 0` with the model
llama-tiny. The first step of a run does not count. With asynchronous rollouts, neither do further steps at both ends,
until as many rollouts are in flight as later, and when fewer are left.

`--predict` records what the plan says of all variants, and of `ROWS`: rows that NeMo-RL publishes, up to 671 B
parameters, with its parallel sizes. None of these predictions is a measurement.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import random_model
import record
from whole_runs import KNOWN_EXPERTS, KNOWN_MODEL, STEP, STEPS_ALONE, steps_of, tiny_run

from nemo_rl_lite import train
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import all_gpus, on_gpus, samples_per_step
from nemo_rl_lite.models.shape import ModelShape, find_shape, model_shape
from nemo_rl_lite.offload.residency import Phase
from nemo_rl_lite.planning.automatic import resolve_auto
from nemo_rl_lite.planning.budget import Budget, budget, size_of
from nemo_rl_lite.planning.lengths import SIGMA, Lengths, quantiles
from nemo_rl_lite.planning.time import StepTime, predict_step
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.play import Assistant, SingleTurn
from nemo_rl_lite.run.command import split_arguments
from nemo_rl_lite.validation.compose import compose_config

RECIPE, PUBLISHED = "grpo-llama3.1-8b-1n8g-pp2", "meta-llama/Llama-3.1-8B-Instruct"
MEGATRON, PACKS = "policy.megatron_cfg", "policy.sequence_packing"
PROMPT, MEAN, GPUS = 130, 795, 8
LENGTHS_8B = Lengths(PROMPT, MEAN, 3840)
SHORT_PROMPT = 110
"""Tokens of a prompt in the larger rows: total tokens by the published throughput, without the published responses."""
LAYERS = {1: 8, 2: 16}
"""By the policy's GPUs; else all."""
PHASES = {
    "generation": ("timing/train/generation",),
    "logprob": ("timing/train/policy_and_reference_logprobs",),
    "train": ("timing/train/policy_training",),
    "refit": ("timing/train/prepare_for_generation/transfer_and_update_weights", "timing/train/refit_check"),
}
SHARES = {
    "MFU of training": "performance/train_fp_utilization",
    "MFU of logprobs": "performance/policy_and_reference_logprobs_fp_utilization",
    "bandwidth share of decoding": "performance/generation_bandwidth_share",
}
MEMORY = {
    "policy's peak in training": "memory/policy_peak_bytes/train",
    "policy's peak in logprob": "memory/policy_peak_bytes/logprob",
    "GPU in use while generating": "memory/device_bytes/generate",
    "GPU in use after training": "memory/device_bytes/train",
}
LENGTHS = {
    "mean prompt": "train/mean_prompt_length",
    "mean response": "train/mean_gen_tokens_per_sample",
    "longest response": "train/max_gen_tokens_per_sample",
}
STALENESS = {"mean staleness": "train/trajectory_age_mean"}
ROLLOUTS = {"sync": [], "one step off": ["async=one_step_off"], "partial": ["async=partial"]}
ENDS = {"sync": (1, 0), "one step off": (2, 1), "partial": (3, 2)}
"""Steps at both ends of a run that do not count."""
# Some responses of a prompt end with a vowel, so that there are advantages and gradients.
REWARD = ["reward=format", "reward.kwargs.pattern='.*[aeiou]'"]
AUTO = (f"{PACKS}.train_mb_tokens=auto", f"{PACKS}.logprob_mb_tokens=auto")
# A trial of everything on two cores; what it measures means nothing.
ON_CPUS = [
    *("cluster.gpus_per_node=0", "policy=megatron", "generation=vllm", "cluster.cpu_ranks=2"),
    *("policy.max_total_sequence_length=256", "generation.max_new_tokens=96", "generation.vllm_cfg.enforce_eager=true"),
    *("algorithm.num_prompts_per_step=4", "algorithm.num_generations_per_prompt=4"),
]


@dataclass(frozen=True)
class Row:
    """A row that NeMo-RL publishes for H100s: its sizes, the lengths, what it says, and what `ours` changes."""

    name: str
    model: str
    shape: str
    """Name in random_model.py."""
    overrides: Sequence[str]
    lengths: Lengths
    published: Mapping[str, float]
    ours: Sequence[str] = AUTO


def larger(hosts: int, prompts: int, samples: int, longest: int, engine: int, **parallel: object) -> list[str]:
    """The overrides of a recipe of NeMo-RL for several hosts. `engine`: GPUs of one. `parallel`: Megatron's keys."""
    return [
        *("algorithm=grpo", "policy=megatron_gpu", "generation=vllm_gpu", "offload=auto", "cluster.gpus_per_node=8"),
        *(f"cluster.num_nodes={hosts}", f"algorithm.num_prompts_per_step={prompts}"),
        *(f"algorithm.num_generations_per_prompt={samples}", "policy.train_global_batch_size=512"),
        *(f"policy.max_total_sequence_length={longest}", f"generation.max_new_tokens={longest - SHORT_PROMPT}"),
        *(f"{PACKS}.train_mb_tokens={longest}", f"{PACKS}.logprob_mb_tokens={longest}"),
        *("algorithm.loss_fn.reference_policy_kl_penalty=0.01", f"generation.vllm_cfg.tensor_parallel_size={engine}"),
        *(f"{MEGATRON}.{key}={value}" for key, value in parallel.items()),
    ]


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["forced"]:
        train_forced(*arguments[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--gpus", type=int, default=GPUS, choices=(0, 1, 2, 4, 8))
    parser.add_argument("--batch", type=int, default=512, choices=(512, 2048), help="that of eight GPUs")
    ahead = parser.add_mutually_exclusive_group()
    parser.set_defaults(rollouts="sync")
    ahead.add_argument("--apart", dest="rollouts", action="store_const", const="one step off")
    ahead.add_argument("--partial", dest="rollouts", action="store_const", const="partial")
    parser.add_argument("--steps", type=int, default=3, help="that count")
    parser.add_argument("--dry-run", action="store_true", help="do everything up to the first process")
    parser.add_argument("--predict", action="store_true", help="write what nrl-lite plan's rules say of all variants")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    if given.predict:
        print(predict())
    elif given.model is None:
        parser.error("a run needs the folder of a model; see random_model.py")
    else:
        measure(given)


def settings(gpus: int, batch: int, rollouts: str) -> list[str]:
    """The overrides of a variant. `rollouts`: a key of `ROLLOUTS`."""
    if not gpus:
        own = [f"policy.train_global_batch_size={16 * batch // 2048}", *ROLLOUTS[rollouts]]
        return [f"recipes={RECIPE}", *ON_CPUS, *own, *REWARD, *STEPS_ALONE]
    policy = policy_gpus(gpus, rollouts)
    own = [f"cluster.gpus_per_node={gpus}", f"algorithm.num_prompts_per_step={64 * gpus // GPUS}"]
    own += [f"policy.train_global_batch_size={batch * gpus // GPUS}"]
    own += [f"policy.megatron_cfg.pipeline_model_parallel_size={min(2, policy)}"]
    own += [f"generation.colocated.resources.gpus_per_node={gpus - policy}"] if gpus > policy else []
    return [f"recipes={RECIPE}", *own, *ROLLOUTS[rollouts], *REWARD, *STEPS_ALONE]


def policy_gpus(gpus: int, rollouts: str) -> int:
    """The policy's GPUs, which it may share with engines."""
    return gpus // 2 if rollouts == "one step off" else gpus


def record_name(gpus: int, batch: int, rollouts: str) -> str:
    """The name of a variant's record, without its hardware."""
    way = "" if rollouts == "sync" else f"-{rollouts.replace(' ', '-')}"
    return f"published-row-{gpus}{way}-{batch}"


def step_seconds(time: StepTime, rollouts: str) -> float:
    """The step time with these phases."""
    return time.overlapped if rollouts == "one step off" else time.synchronous


def planned(
    overrides: Sequence[str], shape: ModelShape, gpu_bytes: int, lengths: Lengths = LENGTHS_8B
) -> tuple[Config, Budget, StepTime]:
    """The settled configuration, and what the plan says of its memory and its seconds."""
    config = resolve_auto(compose_config(list(overrides)), shape, gpu_bytes).config
    return config, budget(config, shape, gpu_bytes), predict_step(config, shape, gpu_bytes, lengths)


def predicted_rows(gpu: str, gpus: int, batch: int, rollouts: str) -> Iterator[dict[str, Any]]:
    """The plan of a variant on GPUs of this name."""
    layers = LAYERS.get(policy_gpus(gpus, rollouts), 32)
    shape = replace(find_shape(PUBLISHED), layers=layers, dense_layers=layers)
    overrides = [*settings(gpus, batch, rollouts), f"policy.model_name={PUBLISHED}"]
    name = f"{gpus} x {gpu}{f', {rollouts}' if rollouts != 'sync' else ''}, batches of {batch * gpus // GPUS}"
    name += f", {layers} layers" if layers < 32 else ""
    yield from predicted(name, gpu, overrides, shape, LENGTHS_8B, rollouts)


def rows_beside() -> Iterator[dict[str, Any]]:
    """Yield published figures of `ROWS`, and the plan of our command with NeMo-RL's sizes and with ours."""
    for row in ROWS:
        for what, value in row.published.items():
            unit = "tokens/s" if what == "throughput per GPU" else "s"
            yield record.result(what, f"{row.name}: published by NeMo-RL", unit, [value])
        shape = model_shape(random_model.model_config(row.shape).to_dict())
        for way, own in (("NeMo-RL's sizes", []), ("`auto`", row.ours)):
            overrides = [*row.overrides, *own, f"policy.model_name={row.model}"]
            yield from predicted(f"{row.name}: predicted, {way}", "H100", overrides, shape, row.lengths)


def predicted(
    name: str, gpu: str, overrides: Sequence[str], shape: ModelShape, lengths: Lengths, rollouts: str = "sync"
) -> Iterator[dict[str, Any]]:
    """The plan of a configuration on GPUs of this name."""
    config, memory, time = planned(overrides, shape, size_of(gpu)[1], lengths)
    step = step_seconds(time, rollouts)
    for phase in PHASES:
        yield record.result(phase, name, "s", [getattr(time, phase)])
    yield record.result("step time", name, "s", [step])
    rate = samples_per_step(config) * (lengths.prompt + lengths.mean) / step / all_gpus(config)
    yield record.result("throughput per GPU", name, "tokens/s", [rate])
    yield record.result("GPU with the highest use", name, "GiB", [memory.device[memory.peak_phase] / 2**30])


ROWS = [
    Row(
        "Llama-3.1-8B, 8 GPUs",
        PUBLISHED,
        "llama3.1-8b",
        settings(GPUS, 512, "sync"),
        LENGTHS_8B,
        {"generation": 58, "logprob": 18, "train": 28, "refit": 5, "step time": 112},
    ),
    Row(
        "Qwen3-30B-A3B, 32 GPUs",
        KNOWN_EXPERTS,
        "qwen3-30b-a3b",
        larger(4, 64, 32, 4096, 2, expert_model_parallel_size=8),
        Lengths(SHORT_PROMPT, 3203, 4096 - SHORT_PROMPT),
        {"step time": 192, "throughput per GPU": 1102},
        [*AUTO, f"{MEGATRON}.activation_checkpointing=true"],
    ),
    Row(
        "Qwen3-235B-A22B, 128 GPUs",
        "Qwen/Qwen3-235B-A22B",
        "qwen3-235b-a22b",
        larger(
            *(16, 16, 32, 8192, 16),
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            pipeline_model_parallel_size=8,
            num_layers_in_first_pipeline_stage=11,
            num_layers_in_last_pipeline_stage=11,
            context_parallel_size=2,
            expert_model_parallel_size=16,
            activation_checkpointing=True,
        ),
        Lengths(SHORT_PROMPT, 5698, 8192 - SHORT_PROMPT),
        {"step time": 395, "throughput per GPU": 58.9},
    ),
    Row(
        "DeepSeek-V3, 256 GPUs",
        "deepseek-ai/DeepSeek-V3",
        "deepseek-v3",
        larger(
            *(32, 32, 16, 1536, 32),
            pipeline_model_parallel_size=16,
            num_layers_in_first_pipeline_stage=3,
            num_layers_in_last_pipeline_stage=2,
            expert_model_parallel_size=16,
            activation_checkpointing=True,
        ),
        Lengths(SHORT_PROMPT, 701, 1536 - SHORT_PROMPT),
        {"step time": 134, "throughput per GPU": 12.1},
    ),
]
"""Rows of NeMo-RL 0.3 and, from the second on, 0.6: docs/about/performance-summary.md, on-policy in bfloat16."""


def predict() -> Path:
    """Write the record of the predictions."""
    variants = [(8, batch, rollouts) for batch in (512, 2048) for rollouts in ROLLOUTS]
    variants += [(gpus, 512, rollouts) for gpus in (4, 2) for rollouts in ROLLOUTS]
    variants += [(1, 512, rollouts) for rollouts in ("sync", "partial")]
    results = [one for gpu in ("H100", "H200") for variant in variants for one in predicted_rows(gpu, *variant)]
    results += rows_beside()
    note = f"Variants: predicted for prompts of {PROMPT} tokens and responses of {MEAN}, the longest of 3840."
    return record.write("published-row-predicted", results, [], note)


def measure(given: argparse.Namespace) -> None:
    """Run the variant and write its record, after which the machine is named."""
    model = given.model.resolve()
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder) / "questions.jsonl"
        questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows()))
        warm, drained = ENDS[given.rollouts]
        overrides = settings(given.gpus, given.batch, given.rollouts)
        overrides += [f"policy.model_name={model}", "data.name=file", f"data.train_path={questions}"]
        overrides += [f"algorithm.max_num_steps={warm + given.steps + drained}", *given.overrides]
        config, mean = compose_config(overrides), MEAN if given.gpus else 40
        command = [sys.executable, __file__, "forced", str(mean), str(SIGMA)]
        command += [*overrides, *(["--dry-run"] if given.dry_run else []), f"hydra.run.dir={folder}/run"]
        if status := subprocess.run(command, cwd=record.ROOT).returncode:
            sys.exit(f"status {status}: {' '.join(command)}")
        if given.dry_run:
            return
        steps = steps_of(Path(folder) / "run")[warm : warm + given.steps]
        print(write(given, config, overrides, steps))


def rows() -> Iterator[dict[str, str]]:
    """Questions of about `PROMPT` tokens, system prompt and chat template included."""
    for first in range(1000, 2000):
        numbers = range(first, first + 15)
        yield {"question": f"What is the sum of {', '.join(map(str, numbers))}?", "answer": f"#### {sum(numbers)}"}


def write(given: argparse.Namespace, config: Config, overrides: list[str], steps: list[dict[str, float]]) -> Path:
    """Write the record of the steps that count, beside the plan where the run is on GPUs."""

    def measured(what: str, unit: str, values: list[float]) -> dict[str, Any]:
        return record.result(what, "measured", unit, values)

    step = [one[STEP] for one in steps]
    results = [measured("step time", "s", step)]
    for phase, names in PHASES.items():
        what = "policy idle" if given.rollouts == "one step off" and phase == "generation" else phase
        results.append(measured(what, "s", [sum(one[name] for name in names) for one in steps]))
    rates = [one["train/total_num_tokens"] / one[STEP] / max(1, all_gpus(config)) for one in steps]
    results.append(measured("throughput per GPU", "tokens/s", rates))
    for names, unit, by in (
        (SHARES, "share", 1),
        (MEMORY, "GiB", 2**30),
        (LENGTHS, "tokens", 1),
        (STALENESS, "steps", 1),
    ):
        for what, name in names.items():
            results += [measured(what, unit, [one[name] / by for one in steps])] if name in steps[0] else []
    if on_gpus(config):
        results += beside(overrides, find_shape(config.policy.model_name), given.rollouts)
    name = record_name(given.gpus, given.batch, given.rollouts)
    return record.write(name, results, [], f"model: {given.model.name}, random weights")


def beside(overrides: list[str], shape: ModelShape, rollouts: str) -> Iterator[dict[str, Any]]:
    """What the plan says of this machine."""
    _, memory, time = planned(overrides, shape, size_of(None)[1])
    yield record.result("step time", "planned", "s", [step_seconds(time, rollouts)])
    for phase in PHASES:
        yield record.result(phase, "planned", "s", [getattr(time, phase)])
    nbytes = [memory.policy[Phase.TRAIN], memory.policy[Phase.LOGPROB]]
    nbytes += [memory.device[Phase.GENERATE], memory.device[Phase.TRAIN]]
    for what, most in zip(MEMORY, nbytes, strict=True):
        yield record.result(what, "planned", "GiB", [most / 2**30])


@cache
def dealt(seed: int, count: int, mean: float, sigma: float, most: int) -> list[int]:
    """Return the lengths of a step's responses, by their numbers. The seed is the step's."""
    lengths = [*quantiles(count, mean, sigma, most)]
    random.Random(seed).shuffle(lengths)
    return lengths


def force(mean: float, sigma: float, samples: int, count: int) -> None:
    """Make single-turn episodes of this process as long as `dealt` says: `samples` of a prompt, `count` of a step."""

    async def play(self: SingleTurn, episode: Episode, assistant: Assistant) -> None:
        seed, prompt, sample = assistant.seeds
        own = dealt(seed, count, mean, sigma, assistant.sampling.max_new_tokens)[prompt * samples + sample]
        await assistant.respond(sampling=replace(assistant.sampling, max_new_tokens=own, stop_token_ids=()))

    SingleTurn.play = play  # type: ignore[method-assign]


def train_forced(mean: str, sigma: str, *arguments: str) -> None:
    """Run the train command with forced lengths."""
    config = compose_config(split_arguments(arguments)[1])
    samples = config.options(RolloutAlgorithmConfig).num_generations_per_prompt
    force(float(mean), float(sigma), samples, samples_per_step(config))
    train.main(list(arguments))


def trial() -> None:
    """Compose a forced run, deal its lengths, and make the records of a run's steps."""
    overrides = [*settings(0, 2048, "sync"), f"policy.model_name={KNOWN_MODEL}"]
    config = compose_config(overrides)
    with patch.object(SingleTurn, "play", SingleTurn.play):
        force(40, SIGMA, 4, samples_per_step(config))
    given = argparse.Namespace(model=Path(KNOWN_MODEL), gpus=0, rollouts="sync", batch=2048)
    print(write(given, config, overrides, steps_of(tiny_run())))
    results = [*predicted_rows("H100", 4, 512, "partial"), *predicted_rows("H200", 2, 512, "one step off")]
    results += rows_beside()
    print(record.write("published-row-predicted", results, []))


if __name__ == "__main__":
    record.start(main, trial)
