"""Make benchmark records and the reward picture of the runs that gpu_run.py kept: python scripts/bench/runs.py"""

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import random_model
import record
import refit_runs
import supervised_runs
from series import Run, mismatch_bars, typical, values

from nemo_rl_lite.models.shape import model_shape
from nemo_rl_lite.planning.memory import parameter_count

RUNS = record.FOLDER / "runs"
PICTURE = record.ROOT / "docs" / "images" / "grpo-smollm2-135m-1n1g.png"
PHASES = {
    "generate": ("generation",),
    "engine sleeps": ("generation_sleep",),
    "logprob": ("policy_and_reference_logprobs",),
    "train": ("policy_training",),
    "refit, engine awake again": ("prepare_for_generation/transfer_and_update_weights",),
    "whole step": ("total_step_time",),
}
PREPARATION = {
    "logprob, preparation": ("logprob_inference_prep",),
    "training, preparation": ("training_prep",),
}
MEMORY = {
    "GPU in use while generating": "memory/device_bytes/generate",
    "GPU in use after training": "memory/device_bytes/train",
    "policy's peak in logprob": "memory/policy_peak_bytes/logprob",
    "policy's peak in training": "memory/policy_peak_bytes/train",
    "policy's peak in refit": "memory/policy_peak_bytes/refit",
}
SEEDS = ("chain-sum-seed1", "chain-sum-seed2", "chain-sum-seed42")
PRESETS = ("none", "logprob", "colocated", "pinned", "cpu_optimizer", "activations", "max_memory")
_SHARED = (
    "Measured while three other runs used the machine's other GPUs and its cores: times are longer than without them."
)
_BESIDE = "Measured while the machine's other GPUs and its cores were used by other work some of the time."
NOTES = {
    ("refit-layouts", "2x-h200"): _BESIDE,
    ("refit-verified", "1x-h200"): _BESIDE,
    ("refit-verified", "2x-h200"): _BESIDE,
    ("largest-model-lora", "1x-h100"): _BESIDE,
    ("grpo-chain-sum", "1x-h200"): _SHARED,
    ("sft-gsm8k", "1x-h200"): _SHARED,
    ("grpo-gsm8k", "1x-h200"): f"{_SHARED} Starts from the model that the SFT run left.",
}


def main() -> None:
    runs = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"))]
    benches = {
        "grpo-chain-sum": (SEEDS, chain_sum),
        "sft-gsm8k": (("sft-gsm8k",), supervised_runs.two_epochs),
        "supervised-gsm8k": (supervised_runs.NAMES, supervised_runs.one_epoch_and_preferences),
        "grpo-gsm8k": (("grpo-gsm8k",), gsm8k),
        "grpo-qwen3-1.7b": (("qwen3-1.7b-colocated",), large),
        "grpo-qwen3-1.7b-noncolocated": (("qwen3-1.7b-noncolocated-1-1", "qwen3-1.7b-noncolocated-tp2-tp2"), apart),
        "offload-presets": (tuple(f"preset-{name}" for name in PRESETS), presets),
        "refit-layouts": (tuple(refit_runs.LAYOUTS), refit_runs.layouts),
        "refit-verified": (tuple(refit_runs.VERIFIED), refit_runs.verified),
        "largest-model": (tuple(run["name"] for run in runs if run["name"].startswith("largest-")), largest),
        "largest-model-lora": (tuple(run["name"] for run in runs if run["name"].startswith("lora-largest-")), largest),
    }
    for bench, (names, measure) in benches.items():
        write(bench, [run for run in runs if run["name"] in names and run["exit_status"] == 0], measure)
    draw([run for run in runs if run["name"] in SEEDS])
    supervised_runs.draw([run for run in runs if run["name"] in supervised_runs.NAMES])


def write(bench: str, runs: list[Run], measure: Callable[[list[Run]], tuple[list, list]]) -> None:
    """Write a record for each kind of machine that the runs were on."""
    for hardware in sorted({run["hardware"]["name"] for run in runs}):
        own = [run for run in runs if run["hardware"]["name"] == hardware]
        results, bars = measure(own)
        first = own[0]
        note = {"note": NOTES[bench, hardware]} if (bench, hardware) in NOTES else {}
        record.save(
            bench,
            {
                "date": first["date"],
                "commit": first["commit"],
                "command": "; ".join(run["command"] for run in own),
                "hardware": first["hardware"],
                "versions": first["versions"],
            }
            | note,
            results,
            bars,
        )


def chain_sum(runs: list[Run]) -> tuple[list, list]:
    config = f"seeds {', '.join(str(run['config']['algorithm']['seed']) for run in runs)}"
    after = [statistics.mean(values(run, "train/reward")[-10:]) for run in runs]
    accuracies = [values(run, "validation/accuracy") for run in runs]
    results = [
        record.result("reward of the first step", config, "share", [values(run, "train/reward")[0] for run in runs]),
        record.result("mean reward of the last ten steps", config, "share", after),
        record.result(
            "first step from which five have mean reward 0.8", config, "step", [reaches(run, 0.8) for run in runs]
        ),
        record.result("held-out accuracy before", config, "share", [one[0] for one in accuracies]),
        record.result("held-out accuracy after", config, "share", [one[-1] for one in accuracies]),
        *steady(runs, config),
    ]
    bars = [
        record.bar("least mean reward of the last ten steps", min(after), 0.8, at_least=True),
        *mismatch_bars(runs),
    ]
    return results, bars


def large(runs: list[Run]) -> tuple[list, list]:
    config = "64 prompts x 8 samples x 512 new tokens"
    results = [
        *steady(runs, config),
        record.result(
            "completion tokens a second while generating",
            config,
            "1/s",
            typical(runs, "performance/generation_tokens_per_sec"),
        ),
        record.result("refit, transfer alone", config, "s", typical(runs, "refit/seconds")),
    ]
    step = statistics.median(typical(runs, "timing/train/total_step_time"))
    bars = [
        record.bar("step, s (TRL 1.16 on an H200: 27.3)", step, 27.3, at_least=False),
        *mismatch_bars(runs),
    ]
    return results, bars


def apart(runs: list[Run]) -> tuple[list, list]:
    config = "64 prompts x 8 samples x 32 new tokens"
    bars = mismatch_bars(runs)
    transfer = [
        record.result("weights sent in a refit", config, "GB", [x / 1e9 for x in typical(runs, "refit/bytes")]),
        record.result("refit, transfer alone", config, "s", typical(runs, "refit/seconds")),
        record.result("refit, transfer alone: rate", config, "GB/s", typical(runs, "refit/gb_per_s")),
    ]
    return [*steady(runs, config), *transfer], bars


def presets(runs: list[Run]) -> tuple[list, list]:
    """Measure the presets, each a setting, without the first step, in which the optimizer makes its states."""
    results, bars = [], []
    for run in sorted(runs, key=lambda run: PRESETS.index(_preset(run))):
        preset = _preset(run)
        for phase, timers in (PHASES | PREPARATION).items():
            series = (values(run, f"timing/train/{timer}")[1:] for timer in timers)
            times = [sum(step) for step in zip(*series, strict=True)]
            results.append(record.result(phase, preset, "s", times))
        for name, metric in MEMORY.items():
            results.append(record.result(name, preset, "GiB", [value / 2**30 for value in values(run, metric)[1:]]))
        exposed, transfer = (_moves(run, ending) for ending in ("_exposed_s", "_s"))
        if transfer:
            results.append(record.result("moves, all copies of a step", preset, "s", transfer))
            results.append(record.result("moves, waited for in a step", preset, "s", exposed))
        if preset == "pinned":
            share = statistics.median(waited / copied for waited, copied in zip(exposed, transfer, strict=True))
            bars.append(record.bar("pinned, waited for, share of its copies", share, 0.25, at_least=False))
    return results, bars


def _preset(run: Run) -> str:
    return run["name"].removeprefix("preset-")


def _moves(run: Run, ending: str) -> list[float]:
    """Return the seconds over all components and both directions, for each step after the first."""
    names = [name for name in run["series"] if name.startswith("offload/") and name.endswith(f"to_host{ending}")]
    names += [name.replace("to_host", "to_device") for name in names]
    return [sum(step) for step in zip(*(values(run, name)[1:] for name in names), strict=True)]


def largest(runs: list[Run]) -> tuple[list, list]:
    results = []
    for run in runs:
        preset, layers, _ = run["name"].split("-")[-3:]
        name = Path(run["config"]["policy"]["model_name"]).name.removesuffix(f"-{layers}-layers")
        family = random_model.model_config(f"{name}:{layers}").to_dict()
        billions = parameter_count(model_shape(family)) / 1e9
        results.append(record.result("model that trained", preset, "B parameters", [billions]))
        results.append(record.result("its layers", preset, "", [int(layers)]))
        for name, metric in (("whole step", "total_step_time"), ("train", "policy_training")):
            results.append(record.result(name, preset, "s", values(run, f"timing/train/{metric}")[1:]))
        peak = max(values(run, "memory/policy_peak_bytes/train")) / 2**30
        results.append(record.result("policy's peak in training", preset, "GiB", [peak]))
    return results, []


def gsm8k(runs: list[Run]) -> tuple[list, list]:
    questions = runs[0]["config"]["algorithm"]["max_val_samples"]
    sampling = f"{questions} test questions, one sample each, temperature 1, at most 300 tokens"
    accuracies = [values(run, "validation/accuracy") for run in runs]
    training = "64 prompts x 8 samples, 25 steps"
    return [
        record.result("test accuracy after SFT", sampling, "share", [one[0] for one in accuracies]),
        record.result("test accuracy after SFT and GRPO", sampling, "share", [one[-1] for one in accuracies]),
        record.result(
            "mean training reward, all steps",
            training,
            "share",
            [statistics.mean(values(run, "train/reward")) for run in runs],
        ),
        *steady(runs, training),
    ], []


def steady(runs: list[Run], config: str) -> Iterable[dict[str, Any]]:
    """Return phase times, throughput and memory: the median of a run's steps, which excludes the slow first one."""
    for phase, timers in PHASES.items():
        times = [
            sum(column) for column in zip(*(typical(runs, f"timing/train/{timer}") for timer in timers), strict=True)
        ]
        yield record.result(f"{phase} (median of a run)", config, "s", times)
    tokens = typical(runs, "performance/tokens_per_sec_per_gpu")
    yield record.result("tokens a second and GPU, whole step", config, "1/s", tokens)
    for name, metric in MEMORY.items():
        yield record.result(name, config, "GiB", [max(values(run, metric)) / 2**30 for run in runs])


def reaches(run: Run, reward: float) -> int:
    """Return the first step from which five steps have this mean reward."""
    rewards = values(run, "train/reward")
    return next(step for step in range(1, len(rewards) - 3) if statistics.mean(rewards[step - 1 : step + 4]) >= reward)


def draw(runs: list[Run]) -> None:
    """Draw the reward over steps, one line for each seed."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for run in sorted(runs, key=lambda run: run["config"]["algorithm"]["seed"]):
        points = run["series"]["train/reward"]
        axes.plot(
            *zip(*points, strict=True),
            label=f"seed {run['config']['algorithm']['seed']}, {run['hardware']['name'][3:].upper()}",
        )
    axes.set(
        xlabel="step",
        ylabel="mean reward",
        ylim=(0, 1.02),
        title="SmolLM2-135M-Instruct, one-digit sums and differences",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(PICTURE), dpi=130)


if __name__ == "__main__":
    main()
