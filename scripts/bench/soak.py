"""Compare a long run with random kills of its processes to the same run without: soak.py [STEPS] [FOLDER]

About every 25 seconds, at a random moment, SIGKILL hits the generation engine, a policy rank, the launcher, Ray's
gcs_server or raylet, or the launcher's whole process group, also while the run is starting. Where the run's command
ends, the script gives the same command again. Runs are on CPUs; both runs' weights must be equal in the end, bit for
bit. A third run, undisturbed and three times as long, shows the resident memory of every process after each step.
"""

import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import record
from safetensors.torch import load_file

KILL_EVERY_S, SAVE_EVERY = 25.0, 5
# The share of kills that fall due before a step has followed the last one, and are done.
HIT_A_START = 0.25
WORKERS, OF_RAY = ("generation-0", "policy-0"), ("gcs_server", "raylet")
# Memory growth counts from this step on, because caches fill before.
SETTLED = 150
PICTURE = record.ROOT / "docs" / "images" / "soak-memory.png"
MIB = 2**20


@dataclass
class Soak:
    """One run and its observations. Memory is in bytes, by process, at steps."""

    folder: Path
    steps: int
    dice: random.Random | None
    """What chooses moments and processes of kills; None: there are none."""
    overrides: tuple[str, ...] = ()
    """Of the command, after those that all of these runs have."""
    workers: tuple[str, ...] = WORKERS
    kill_every_s: float = KILL_EVERY_S
    hit_a_start: float = HIT_A_START
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    step_s: list[float] = field(default_factory=list)
    kills: list[tuple[str, float]] = field(default_factory=list)
    survived: int = 0
    """Kills that a finished step has followed."""

    @property
    def faults(self) -> tuple[str, ...]:
        """What may be killed."""
        return (*self.workers, "launcher", *OF_RAY, "process group")

    def recovered(self) -> list[dict[str, Any]]:
        """The seconds from each kill to the end of the next step, as results of a record."""
        kinds = sorted(self.recovery_s.items())
        which = self.folder.name
        return [record.result(f"from a killed {kind} to the next step's end", which, "s", own) for kind, own in kinds]

    def run(self) -> None:
        """Run until the last step is done; fail where the run ends without a kill."""
        done = threading.Event()
        self._process = self._start()
        if self.dice:
            threading.Thread(target=self._disturb, args=(self.dice, done), daemon=True).start()
        while True:
            for at, step, seconds in _steps(self._process):
                self._note_memory(self._process.pid, step)
                self.step_s.append(seconds)
                for name, killed_at in self.kills[self.survived :]:
                    self.recovery_s[name].append(at - killed_at)
                    self.survived += 1
            status = self._process.wait()
            if status == 0:
                break
            print(f"the command ended with status {status}", flush=True)
            if self.survived == len(self.kills):
                sys.exit(f"the run in {self.folder} ended with status {status}, and nothing was killed")
            self._process = self._start()
        done.set()

    def _disturb(self, dice: random.Random, done: threading.Event) -> None:
        left: list[str] = []
        while not done.wait(self.kill_every_s * dice.uniform(0.8, 1.2)):
            # A start takes most of 25 seconds: were each one hit, no step would ever be done.
            if len(self.kills) > self.survived and dice.random() > self.hit_a_start:
                continue
            # Every kind in a random order, then again.
            left = left or dice.sample(self.faults, len(self.faults))
            name = left.pop()
            try:
                self._kill(name, self._process)
            except (LookupError, OSError, StopIteration, psutil.NoSuchProcess):
                print(f"{name} was not there to be killed", flush=True)
                continue
            self.kills.append((name, time.monotonic()))
            print(f"killed {name}", flush=True)

    def _start(self) -> "subprocess.Popen[str]":
        overrides = [
            f"hydra.run.dir={self.folder}",
            f"algorithm.max_num_steps={self.steps}",
            "algorithm.num_prompts_per_step=8",
            "policy.train_global_batch_size=64",
            "policy.train_micro_batch_size=64",
            "policy.logprob_batch_size=64",
            "algorithm.val_period=0",
            f"checkpoint.save_period={SAVE_EVERY}",
            "cluster.max_restarts=1000",
            "logger.plots=false",
            *self.overrides,
        ]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        log = (self.folder.parent / f"{self.folder.name}.err").open("a")
        command = [sys.executable, "-m", "nemo_rl_lite.train", *overrides]
        # In a session, and so a process group, of its own.
        pipes = {"stdout": subprocess.PIPE, "stderr": log, "text": True, "start_new_session": True}
        return subprocess.Popen(command, cwd=record.ROOT, **pipes)

    def _kill(self, name: str, launcher: "subprocess.Popen[str]") -> None:
        if name == "process group":
            os.killpg(launcher.pid, signal.SIGKILL)
        elif name in OF_RAY:
            children = psutil.Process(launcher.pid).children(recursive=True)
            os.kill(next(child.pid for child in children if child.name() == name), signal.SIGKILL)
        else:
            os.kill(launcher.pid if name == "launcher" else self._worker(name), signal.SIGKILL)

    def _worker(self, name: str) -> int:
        """The process of a worker. Raises LookupError, OSError: there was none yet."""
        return int(re.findall(r"process (\d+)", (self.folder / "logs" / f"{name}.log").read_text())[-1])

    def _note_memory(self, launcher: int, step: int) -> None:
        for name, pid in (("launcher", launcher), *((name, self._worker(name)) for name in self.workers)):
            try:
                self.memory[name].append((step, psutil.Process(pid).memory_info().rss))
            except psutil.NoSuchProcess:
                continue


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp())
    calm = Soak(folder / "undisturbed", steps, None)
    rough = Soak(folder / "disturbed", steps, random.Random(0))
    long = Soak(folder / "long", 3 * steps, None)
    results, clocks = [], {}
    for soak in (calm, rough, long):
        started = time.monotonic()
        soak.run()
        clocks[soak.folder.name] = time.monotonic() - started
        results.append(record.result("whole run", soak.folder.name, "s", [clocks[soak.folder.name]]))
        results.append(record.result("step", soak.folder.name, "s", [statistics.median(soak.step_s)]))
    results += rough.recovered()
    undone = (rough.folder / "metrics-undone.jsonl").read_text().count('"train/loss"')
    results.append(record.result("steps taken again", "disturbed", "", [undone]))
    results.append(record.result("kills", "disturbed", "", [len(rough.kills)]))
    growth = {name: _growth(series) for name, series in long.memory.items()}
    for name, share in growth.items():
        settled = [nbytes / MIB for step, nbytes in long.memory[name] if step % 25 == 0]
        results.append(record.result(f"memory of {name}, every 25th step", "long", "MiB", settled))
        results.append(record.result(f"growth of {name} from step {SETTLED} on", "long", "share", [share]))
    same = float(_same_weights(calm.folder, rough.folder))
    bars = [
        record.bar("steps", steps, 150, at_least=True),
        record.bar("kinds of processes that were killed", len(rough.recovery_s), len(rough.faults), at_least=True),
        record.bar("both runs end with the same weights", same, 1, at_least=True),
        record.bar("largest growth of a process", max(growth.values()), 0.02, at_least=False),
    ]
    sys.stdout.write(record.write("soak", results, bars).read_text())
    # The picture is drawn last: it is a tracked file, which would make the commit look changed.
    _draw(long, rough)


def _steps(process: "subprocess.Popen[str]") -> Iterator[tuple[float, int, float]]:
    """Yield the time of each step's line, the step's number and its seconds."""
    lines: queue.Queue[tuple[float, str]] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put((time.monotonic(), line))
        lines.put((time.monotonic(), ""))

    threading.Thread(target=read, daemon=True).start()
    while (arrived := lines.get())[1]:
        found = re.match(r"step +(\d+)/\d+ .*?([\d.]+) s ", arrived[1])
        if found:
            yield arrived[0], int(found[1]), float(found[2])


def _growth(series: list[tuple[int, int]]) -> float:
    """Return the relative growth of a process from SETTLED on: the last tenth against the first."""
    settled = [nbytes for step, nbytes in series if step >= SETTLED]
    tenth = max(1, len(settled) // 10)
    first, last = statistics.median(settled[:tenth]), statistics.median(settled[-tenth:])
    return last / first - 1


def _same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "hf" / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def _draw(long: Soak, rough: Soak) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, soak in zip(axes, (long, rough), strict=True):
        for name, series in soak.memory.items():
            axis.plot([step for step, _ in series], [nbytes / MIB for _, nbytes in series], ".", ms=3, label=name)
        axis.set(title=soak.folder.name, xlabel="step", ylabel="resident MiB", ylim=(0, None))
        axis.legend()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
