"""Keep whole runs on GPUs with their curves, and make benchmark records of them.

runs.py keep NAME [OVERRIDE ...]     trains, and writes docs/benchmarks/runs/NAME.json
runs.py records                      makes the records of all runs that were kept

`NRL_BENCH_OUT` names another folder, `NRL_BENCH_COMMIT` the commit where the machine has no git. After
`NRL_BENCH_LIMIT_S` seconds a run is interrupted, and its steps so far are kept.
"""

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import random_model
import record
from whole_runs import PHASES, tiny_run

from nemo_rl_lite.models.shape import model_shape
from nemo_rl_lite.planning.parameters import parameter_count
from nemo_rl_lite.rollout.store import read_rollout, rollout_files

Run = dict[str, Any]
RUNS = record.FOLDER / "runs"
GENERATED = ("reasoning_gym", "reverse_digits")
PICTURE = record.ROOT / "docs" / "images" / "supervised-gsm8k.png"
MEMORY = {
    "GPU in use while generating": "memory/device_bytes/generate",
    "GPU in use after training": "memory/device_bytes/train",
    "policy's peak in logprob": "memory/policy_peak_bytes/logprob",
    "policy's peak in training": "memory/policy_peak_bytes/train",
    "policy's peak in refit": "memory/policy_peak_bytes/refit",
}
PRESETS = [
    f"preset-{name}"
    for name in ("none", "logprob", "colocated", "pinned", "cpu_optimizer", "activations", "max_memory")
]
SFT = {"sft-gsm8k-epoch": "SFT, 1 epoch", "sft-gsm8k-lora": "SFT with LoRA, 1 epoch"}
DPO = "dpo-gsm8k"
ACCURACY = {"gsm8k-accuracy-base": "before", "gsm8k-accuracy-sft": "after SFT, 1 epoch"}
LAYOUTS = {
    "refit-tp2-tp2": "TP 2 -> TP 2",
    "refit-pp2-tp2": "PP 2 -> TP 2",
    "refit-dp2-2": "DP 2 -> 2 replicas",
    "refit-tp4-tp4": "TP 4 -> TP 4",
    "refit-apart-tp2-tp2": "TP 2 -> TP 2 on two other GPUs",
}


def main(arguments: list[str]) -> None:
    match arguments:
        case ["keep", name, *overrides]:
            sys.exit(keep(name, overrides))
        case ["records"]:
            records()
        case _:
            sys.exit(__doc__)


def keep(name: str, overrides: list[str]) -> int:
    """Train, and keep the run; return its exit status."""
    target = Path(os.environ.get("NRL_BENCH_OUT", RUNS)) / f"{name}.json"
    folder = record.ROOT / "outputs" / "bench" / f"{name}-{os.getpid()}"
    arguments, started = ["-m", "nemo_rl_lite.train", *overrides], time.time()
    status = _run([sys.executable, *arguments, f"hydra.run.dir={folder}"])
    if status:
        for log in sorted(folder.glob("logs/*.log")):
            print(f"--- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n")
    if not (folder / "metrics.jsonl").exists():
        sys.exit(f"{name}: the run ended with status {status} before it had any metrics; see its output above")
    kept = _kept(name, folder, started, status, arguments)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(kept) + "\n")
    seconds, first = kept["seconds"], kept["seconds_to_first_step"] or 0
    print(f"{name}: status {status}, {seconds:.0f} s, {first:.0f} s to the first step")
    return status


def _kept(name: str, folder: Path, started: float, status: int, arguments: list[str]) -> Run:
    """Return what is kept of a run's folder."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((folder / "config.json").read_text())
    steps = [line for line in lines if PHASES[0][2] in line]
    first = steps[0]["time"] - steps[0][PHASES[0][2]] if steps else None
    return {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": record.commit(),
        "command": f"python {shlex.join(arguments)}",
        "exit_status": status,
        "hardware": record.describe_hardware(),
        "versions": record.versions(record.PACKAGES),
        "config": config,
        "seconds": time.time() - started,
        "seconds_to_first_step": first - started if first else None,
        "series": _series(lines),
        # Samples are kept for generated problems only: a dataset's rows may not be copied.
        "samples": _samples(folder) if config["data"]["name"] in GENERATED else [],
    }


def _run(command: list[str]) -> int:
    """Run the command and return its exit status."""
    process, limit_s = subprocess.Popen(command, cwd=record.ROOT), os.environ.get("NRL_BENCH_LIMIT_S")
    try:
        return process.wait(float(limit_s) if limit_s else None)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.wait()


def _series(lines: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Return each metric's [step, value] pairs, with six digits."""
    series: dict[str, list[list[float]]] = {}
    for line in lines:
        for metric, value in line.items():
            if metric not in ("step", "time"):
                series.setdefault(metric, []).append([line["step"], float(f"{value:.6g}")])
    return series


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Return the first samples of the first and the last step."""
    files = [file for file in rollout_files(folder) if file.stem.endswith("train")]
    return [row for file in (*files[:1], *files[-1:]) for row in read_rollout(file)[:2]]


def records() -> None:
    """Make the records of the runs that were kept, one for each kind of machine."""
    runs = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"))]
    runs = [run for run in runs if run["exit_status"] == 0]
    largest_runs = [run["name"] for run in runs if run["name"].startswith("largest-")]
    lora_runs = [run["name"] for run in runs if run["name"].startswith("lora-largest-")]
    benches: dict[str, tuple[list[str], Callable[[list[Run]], tuple[list, list]]]] = {
        "offload-presets": (PRESETS, presets),
        "supervised-gsm8k": ([*SFT, DPO, *ACCURACY], supervised),
        "refit-layouts": (list(LAYOUTS), layouts),
        "largest-model": (largest_runs, largest),
        "largest-model-lora": (lora_runs, largest),
    }
    for bench, (names, measure) in benches.items():
        chosen = [run for run in runs if run["name"] in names]
        for hardware in sorted({run["hardware"]["name"] for run in chosen}):
            own = [run for run in chosen if run["hardware"]["name"] == hardware]
            own.sort(key=lambda run: names.index(run["name"]))
            origin = {key: own[0][key] for key in ("date", "commit", "hardware", "versions")}
            origin["command"] = "; ".join(run["command"] for run in own)
            print(record.save(bench, origin, *measure(own)))


def values(run: Run, metric: str) -> list[float]:
    return [value for _, value in run["series"][metric]]


def presets(runs: list[Run]) -> tuple[list, list]:
    """Measure the presets, without the first step, in which the optimizer makes its states."""
    results, bars = [], []
    for run in runs:
        preset = run["name"].removeprefix("preset-")
        for phase, unit, metric, _ in PHASES:
            results.append(record.result(phase, preset, unit, values(run, metric)[1:]))
        for name, metric in MEMORY.items():
            results.append(record.result(name, preset, "GiB", [value / 2**30 for value in values(run, metric)[1:]]))
        exposed, transfer = (_moves(run, ending) for ending in ("_exposed_s", "_s"))
        if transfer:
            results.append(record.result("copies per step", preset, "s", transfer))
            results.append(record.result("exposed copies per step", preset, "s", exposed))
        if preset == "pinned":
            share = statistics.median(waited / copied for waited, copied in zip(exposed, transfer, strict=True))
            bars.append(record.bar("pinned, waited for, share of its copies", share, 0.25, at_least=False))
    return results, bars


def _moves(run: Run, ending: str) -> list[float]:
    """Return the seconds over all components and both directions, for each step after the first."""
    names = [name for name in run["series"] if name.startswith("offload/") and name.endswith(f"to_host{ending}")]
    names += [name.replace("to_host", "to_device") for name in names]
    return [sum(step) for step in zip(*(values(run, name)[1:] for name in names), strict=True)]


def layouts(runs: list[Run]) -> tuple[list, list]:
    """Measure refits by layout, without the first, which uses the engine's loader."""
    results = []
    for run in runs:
        setting = LAYOUTS[run["name"]]
        for name in ("seconds", "iterate_s", "pack_s", "transfer_s", "load_s"):
            results.append(record.result(name.removesuffix("_s"), setting, "s", values(run, f"refit/{name}")[1:]))
        # The first refit brings all weights to each engine rank.
        results.append(record.result("weights of a refit", setting, "GB", [values(run, "refit/bytes")[0] / 1e9]))
    worst = max(max(values(run, "train/token_mult_prob_error")) for run in runs)
    return results, [record.bar("largest token_mult_prob_error of a step", worst, 1.05, at_least=False)]


def largest(runs: list[Run]) -> tuple[list, list]:
    results = []
    for run in runs:
        preset, layers, _ = run["name"].split("-")[-3:]
        name = Path(run["config"]["policy"]["model_name"]).name.removesuffix(f"-{layers}-layers")
        family = random_model.model_config(f"{name}:{layers}").to_dict()
        billions = parameter_count(model_shape(family)) / 1e9
        results.append(record.result("model that trained", preset, "B parameters", [billions]))
        results.append(record.result("its layers", preset, "", [int(layers)]))
        for name, metric in (("step time", "total_step_time"), ("train", "policy_training")):
            results.append(record.result(name, preset, "s", values(run, f"timing/train/{metric}")[1:]))
        peak = max(values(run, "memory/policy_peak_bytes/train")) / 2**30
        results.append(record.result("policy's peak in training", preset, "GiB", [peak]))
    return results, []


def supervised(runs: list[Run]) -> tuple[list, list]:
    """Measure SFT with and without LoRA, and DPO after SFT, on GSM8K; draw their curves."""
    by_name, results = {run["name"]: run for run in runs}, []
    for name, setting in SFT.items():
        results += _trained(by_name[name], setting, "step of 64 chats")
    for name, setting in ACCURACY.items():
        accuracy = values(by_name[name], "validation/accuracy")[:1]
        results.append(record.result("accuracy on 1,319 test questions, greedy", setting, "share", accuracy))
    preferences, setting = by_name[DPO], "DPO after SFT, 2 epochs of pairs"
    accuracies = values(preferences, "validation/accuracy")
    results.append(record.result("held-out preference accuracy before", setting, "share", accuracies[:1]))
    results.append(record.result("held-out preference accuracy after", setting, "share", accuracies[-1:]))
    results += _trained(preferences, setting, "step of 64 pairs")
    _draw(by_name)
    return results, [record.bar("held-out preference accuracy after", accuracies[-1], 0.6, at_least=True)]


def _trained(run: Run, setting: str, step: str) -> list[dict[str, Any]]:
    losses, rate = values(run, "validation/val_loss"), values(run, "performance/tokens_per_sec_per_gpu")
    return [
        record.result("held-out loss before", setting, "nats", losses[:1]),
        record.result("held-out loss after", setting, "nats", losses[-1:]),
        record.result(step, setting, "s", [statistics.median(values(run, PHASES[0][2]))]),
        record.result("throughput per GPU", setting, "tokens/s", [statistics.median(rate)]),
        record.result("end to end", setting, "s", [run["seconds"]]),
    ]


def _draw(by_name: dict[str, Run]) -> None:
    """Draw the held-out loss of SFT and the held-out accuracy of DPO over optimizer steps."""
    figure, (losses, accuracies) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, label in SFT.items():
        losses.plot(*zip(*by_name[name]["series"]["validation/val_loss"], strict=True), marker=".", label=label)
    losses.set(xlabel="optimizer step", ylabel="nats per token", title="held-out loss, GSM8K test solutions")
    losses.legend()
    accuracies.plot(*zip(*by_name[DPO]["series"]["validation/accuracy"], strict=True), marker=".", color="tab:green")
    accuracies.set(xlabel="optimizer step", ylabel="share", ylim=(0.45, 0.75), title="DPO: accuracy on held-out pairs")
    for axes in (losses, accuracies):
        axes.grid(alpha=0.3)
    figure.savefig(Path(os.environ.get("NRL_BENCH_OUT", PICTURE.parent)) / PICTURE.name, dpi=130)
    plt.close(figure)


def trial() -> None:
    """Make all records again, and keep a run from its files."""
    main(["records"])
    print(_kept("tiny", tiny_run(), time.time() - 60, 0, [])["seconds_to_first_step"])


if __name__ == "__main__":
    record.start(main, trial)
