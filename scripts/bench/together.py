"""Several trainings at the same time on the GPUs of one machine, each a command with its own Ray."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record

STAGGER_S = 2.0
"""Between two starts, because two that search a free port at the same time may find the same one."""
GRACE_S = 20.0
"""For a run that is interrupted at the limit to end."""
_WHEN_THE_PARENT_DIES = 1
"""Linux's number of PR_SET_PDEATHSIG."""


@dataclass(frozen=True)
class Job:
    """One training: a name for its folder, and its overrides."""

    name: str
    overrides: Sequence[str]


@dataclass
class Running:
    """A training that has begun."""

    job: Job
    process: subprocess.Popen
    gpu: int
    began: float


@dataclass(frozen=True)
class Ended:
    """A training that has ended, with its metrics and how long the command took, in seconds."""

    job: Job
    status: int
    seconds: float
    lines: list[dict[str, Any]]
    folder: Path


def run_together(
    jobs: Sequence[Job], at_once: int, gpus: int, folder: Path, limit_s: float, report: Callable[[Ended], None]
) -> None:
    """Run the jobs, `at_once` on each of `gpus` GPUs, and report each as it ends. After `limit_s` seconds none begins,
    and those that run are interrupted and reported with the steps they have."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting, running, last, until = list(jobs), list[Running](), 0.0, time.monotonic() + limit_s
    try:
        while running or (waiting and time.monotonic() < until):
            load = {gpu: sum(one.gpu == gpu for one in running) for gpu in range(max(gpus, 1))}
            gpu, now = min(load, key=load.__getitem__), time.monotonic()
            if now >= until:
                _interrupt(running)
            elif waiting and load[gpu] < at_once and now - last >= STAGGER_S:
                running.append(_start(waiting.pop(0), gpu, gpus, folder))
                last = now
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                report(_ended(one, folder))
            time.sleep(0.3)
    finally:
        _interrupt(running)


def _start(job: Job, gpu: int, gpus: int, folder: Path) -> Running:
    command = [sys.executable, "-m", "nemo_rl_lite.train", *job.overrides, f"hydra.run.dir={folder / job.name}"]
    own = {"CUDA_VISIBLE_DEVICES": _visible(gpu)} if gpus > 1 else {}
    with _log(folder, job).open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=record.ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | own,
            preexec_fn=end_with_the_script,
        )
    return Running(job, process, gpu, time.monotonic())


def end_with_the_script() -> None:
    """A script that is killed must leave no trainings behind, which would hold the GPUs."""
    ctypes.CDLL(None).prctl(_WHEN_THE_PARENT_DIES, signal.SIGTERM)


def _visible(gpu: int) -> str:
    """The number that CUDA gives this process's GPU `gpu`."""
    named = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    return named[gpu] if named else str(gpu)


def _interrupt(running: Sequence[Running]) -> None:
    for one in running:
        one.process.send_signal(signal.SIGINT)
    for one in running:
        try:
            one.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            one.process.kill()  # what it has started ends with it
            one.process.wait()


def _ended(one: Running, folder: Path) -> Ended:
    place, seconds = folder / one.job.name, time.monotonic() - one.began
    metrics = place / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if one.process.returncode:
        end = "\n".join(_log(folder, one.job).read_text(errors="replace").splitlines()[-25:])
        print(f"{one.job.name} ended with status {one.process.returncode} after {seconds:.0f} s:\n{end}", flush=True)
        for log in sorted(place.glob("logs/*.log")):
            print(
                f"--- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-12:], sep="\n", flush=True
            )
    return Ended(one.job, one.process.returncode, seconds, lines, place)


def _log(folder: Path, job: Job) -> Path:
    return folder / f"{job.name}.log"
