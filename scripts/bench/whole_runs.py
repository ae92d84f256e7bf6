"""Run the train command, read what its steps measured, and try all that without the device."""

import atexit
import functools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import record

from nemo_rl_lite.observability.environment import versions

# A run keeps nothing but its metrics, and takes steps and does nothing else.
STEPS_ALONE = [
    *("algorithm.val_at_start=false", "algorithm.val_at_end=false", "algorithm.val_period=0", "logger.plots=false"),
    *("checkpoint.export_hf_at_end=false", "checkpoint.save_period=0"),
]
WORDS = ["north", "river", "apple", "seven", "stone", "light", "under", "green", "house", "paper", "window", "early"]
"""Words of random texts, of about one token each."""
STEP = "timing/train/total_step_time"
Quantity = tuple[str, str, str, float]
"""Name, unit, metric, and the number that the metric is divided by."""
PHASES: list[Quantity] = [
    ("step time", "s", STEP, 1),
    ("generation", "s", "timing/train/generation", 1),
    ("logprob", "s", "timing/train/policy_and_reference_logprobs", 1),
    ("train", "s", "timing/train/policy_training", 1),
    ("refit", "s", "timing/train/prepare_for_generation/transfer_and_update_weights", 1),
]
KNOWN_MODEL, KNOWN_EXPERTS = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-30B-A3B"
"""Models whose shapes the package knows, for commands that a trial only composes."""
TINY = [
    *("policy.max_total_sequence_length=32", "generation=transformers", "generation.max_new_tokens=8"),
    *("algorithm.num_prompts_per_step=4", "algorithm.num_generations_per_prompt=2", "cluster.threads_per_worker=1"),
    *("policy.train_global_batch_size=8", "policy.train_micro_batch_size=8", "algorithm.max_num_steps=8"),
    *("algorithm.max_val_samples=4", "logger.plots=false", "checkpoint.save_period=0"),
]


def one_run(
    overrides: Sequence[str], warm: int, drained: int = 0, paths: Sequence[str] = ()
) -> tuple[list[dict[str, float]], float]:
    """Run the command. Return the metrics of its steps but the first `warm` and the last `drained`, and the seconds
    from the command to the first step. `paths`: see `run_in`."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        steps = run_in(Path(folder) / "run", overrides, paths)
    return steps[warm : len(steps) - drained], steps[0]["time"] - steps[0][STEP] - started


def run_in(folder: Path, overrides: Sequence[str], paths: Sequence[str] = ()) -> list[dict[str, float]]:
    """Run the command in a folder; return the metrics of its steps. Raises SystemExit: it failed.

    `paths`: another checkout, then folders with other versions of packages.
    """
    if _trial:
        from nemo_rl_lite.validation.compose import compose_config

        compose_config(list(overrides))
        shutil.copytree(tiny_run(), folder)
    else:
        command = [sys.executable, "-m", "nemo_rl_lite.train", *overrides, f"hydra.run.dir={folder}"]
        with tempfile.TemporaryFile("w+") as log:
            where: dict[str, Any] = {"cwd": paths[0] if paths else record.ROOT}
            if paths:
                where["env"] = os.environ | {"PYTHONPATH": ":".join([*paths, os.environ.get("PYTHONPATH", "")])}
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, **where).returncode
            if status:
                log.seek(0)
                raise SystemExit(f"status {status} of {overrides}\n{log.read()[-4000:]}")
    return steps_of(folder)


def steps_of(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run's steps, in their order."""
    steps: dict[int, dict[str, float]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        steps.setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps) if STEP in steps[step]]


def results_of(steps: Sequence[dict[str, float]], config: str, quantities: Sequence[Quantity]) -> list[dict[str, Any]]:
    """Return the results of those of the quantities that the steps have."""
    results = []
    for what, unit, metric, by in quantities:
        found = [line[metric] / by for line in steps if metric in line]
        results += [record.result(what, config, unit, found)] if found else []
    return results


class Times:
    """Quantities of a peer's steps by setting, in a file of JSON that is written after each step. The first step of a
    setting does not count."""

    def __init__(self, path: Path):
        self.path = path
        self.steps: dict[str, dict[str, list[float]]] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, str] = {}

    def add(self, setting: dict[str, Any], step: dict[str, float]) -> None:
        """Keep a step, unless it is the setting's first."""
        if label(setting) in self.settings:
            kept = self.steps.setdefault(label(setting), {})
            for name, value in step.items():
                kept.setdefault(name, []).append(value)
        self.settings[label(setting)] = setting
        self._write()

    def skip(self, setting: dict[str, Any], error: Exception) -> None:
        """Keep why a setting has no steps."""
        # The cause is the last line of an error that Ray brings.
        last = str(error).strip().splitlines()[-1:]
        self.skipped[label(setting)] = f"{type(error).__name__}: {''.join(last)[:300]}"
        print(f"{label(setting)}: {type(error).__name__}: {error}", flush=True)
        self._write()

    def _write(self) -> None:
        kept = {
            "steps": self.steps,
            "settings": self.settings,
            "skipped": self.skipped,
            "versions": versions((*record.PACKAGES, "trl", "verl", "peft")),
        }
        self.path.write_text(json.dumps(kept, indent=2))


def label(setting: dict[str, Any]) -> str:
    """Return the name of a peer's setting."""
    return ", ".join(f"{name} {value}" for name, value in sorted(setting.items()))


def model_key(model: Path) -> str:
    """Return the override that names a model: a folder by its whole path, because runs start elsewhere."""
    return f"policy.model_name={model.resolve() if model.exists() else model}"


_trial = False


@contextmanager
def tried() -> Iterator[None]:
    """In the block, compose each command instead of running it, and take the steps of `tiny_run`."""
    global _trial
    _trial = True
    try:
        yield
    finally:
        _trial = False


@functools.cache
def tiny_run() -> Path:
    """Return the folder of a real run of an untrained model on CPUs, one for each process."""
    global _trial
    folder = _temporary()
    before, _trial = _trial, False
    try:
        run_in(folder / "run", [*TINY, f"policy.model_name={tiny_model()}"])
    finally:
        _trial = before
    return folder / "run"


@functools.cache
def tiny_model() -> Path:
    """Return the folder of the embedded model without its warm start."""
    from nemo_rl_lite.models.embedded import build_model, build_tokenizer

    folder = _temporary() / "tiny"
    build_model(seed=0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def processes(on_gpus: bool) -> BaseContext:
    """Return the context of a script's ranks: spawned with GPUs, forked on CPUs from a process with their imports."""
    if on_gpus:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    return context


def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=os.environ.get("NRL_BENCH_OUT")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
