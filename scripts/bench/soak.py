"""Compare a long run with random kills of its processes to the same run without: soak.py [STEPS] [FOLDER]

Every twenty steps SIGKILL hits the generation engine, a policy rank or the launcher (in turn), at a random moment
within a second after a step (a step takes less than half of that); the script restarts a killed launcher with the same
command. Runs are on CPUs; both runs' weights must be equal in the end, bit for bit. The script reads the resident
memory of every process after each step.
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

import psutil
import record
from safetensors.torch import load_file

KILL_EVERY, SAVE_EVERY = 20, 5
FAULTS = ("generation-0", "policy-0", "launcher")
# Memory growth counts from this step on, because caches fill before.
SETTLED = 100
PICTURE = record.ROOT / "docs" / "images" / "soak-memory.png"
MIB = 2**20


@dataclass
class Soak:
    """One run and its observations. Memory is in bytes, by process, at steps."""

    folder: Path
    steps: int
    kills: dict[int, tuple[str, float]]
    """Step after which to kill: what, and how many seconds after its end."""
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lost_steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    step_s: list[float] = field(default_factory=list)
    undone: int = 0

    def run(self) -> None:
        """Run until the last step is done; fail where the run fails."""
        hit: tuple[str, float] | None = None
        status = 1
        while status:
            process, killed = self._start(), False
            for at, step, seconds in _steps(process):
                self._note_memory(process.pid, step)
                if hit is None:
                    self.step_s.append(seconds)
                elif at > hit[1]:
                    # The interrupted step is done: the recovery is the time beyond a step's.
                    name, killed_at = hit
                    self.recovery_s[name].append(at - killed_at - statistics.median(self.step_s))
                    self.lost_steps[name].append(self._undone_steps())
                    hit = None
                if step in self.kills and hit is None:
                    name, delay = self.kills.pop(step)
                    time.sleep(delay)
                    hit = (name, time.monotonic())
                    killed = name == "launcher"
                    self._kill(name, process)
            status = process.wait()
            if status and not killed:
                sys.exit(f"the run in {self.folder} ended with status {status}")

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
        ]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        log = (self.folder.parent / f"{self.folder.name}.err").open("a")
        command = [sys.executable, "-m", "nemo_rl_lite.train", *overrides]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=record.ROOT)

    def _kill(self, name: str, launcher: "subprocess.Popen[str]") -> None:
        os.kill(launcher.pid if name == "launcher" else self._worker(name), signal.SIGKILL)

    def _worker(self, name: str) -> int:
        return int(re.findall(r"process (\d+)", (self.folder / "logs" / f"{name}.log").read_text())[-1])

    def _note_memory(self, launcher: int, step: int) -> None:
        for name, pid in (("launcher", launcher), *((name, self._worker(name)) for name in FAULTS[:2])):
            try:
                self.memory[name].append((step, psutil.Process(pid).memory_info().rss))
            except psutil.NoSuchProcess:
                continue

    def _undone_steps(self) -> float:
        """Return the steps that were repeated since the last kill."""
        path = self.folder / "metrics-undone.jsonl"
        lines = [line for line in path.read_text().splitlines() if '"train/loss"' in line] if path.exists() else []
        count, self.undone = len(lines) - self.undone, len(lines)
        return float(count)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp())
    dice = random.Random(0)
    kills = {
        step + dice.randrange(KILL_EVERY // 2): (FAULTS[index % len(FAULTS)], dice.uniform(0, 1.0))
        for index, step in enumerate(range(KILL_EVERY, steps - KILL_EVERY // 2, KILL_EVERY))
    }
    calm, rough = Soak(folder / "undisturbed", steps, {}), Soak(folder / "disturbed", steps, kills)
    results, clocks = [], {}
    for soak in (calm, rough):
        started = time.monotonic()
        soak.run()
        clocks[soak.folder.name] = time.monotonic() - started
        results.append(record.result("whole run", soak.folder.name, "s", [clocks[soak.folder.name]]))
        results.append(record.result("step", soak.folder.name, "s", [statistics.median(soak.step_s)]))
    for name in FAULTS:
        results.append(record.result(f"recovery from a killed {name}", "disturbed", "s", rough.recovery_s[name]))
        results.append(
            record.result(f"steps taken again after a killed {name}", "disturbed", "", rough.lost_steps[name])
        )
    growth = {name: _growth(series) for name, series in calm.memory.items()}
    for name, share in growth.items():
        settled = [nbytes / MIB for step, nbytes in calm.memory[name] if step % 20 == 0]
        results.append(record.result(f"memory of {name}, every 20th step", "undisturbed", "MiB", settled))
        results.append(record.result(f"growth of {name} from step {SETTLED} on", "undisturbed", "share", [share]))
    same = float(_same_weights(calm.folder, rough.folder))
    bars = [
        record.bar("steps", steps, 300, at_least=True),
        record.bar("both runs end with the same weights", same, 1, at_least=True),
        record.bar("largest growth of a process", max(growth.values()), 0.02, at_least=False),
    ]
    sys.stdout.write(record.write("soak", results, bars).read_text())
    # The picture is drawn last: it is a tracked file, which would make the commit look changed.
    _draw(calm, rough)


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


def _draw(calm: Soak, rough: Soak) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, soak in zip(axes, (calm, rough), strict=True):
        for name, series in soak.memory.items():
            axis.plot([step for step, _ in series], [nbytes / MIB for _, nbytes in series], ".", ms=3, label=name)
        axis.set(title=soak.folder.name, xlabel="step", ylabel="resident MiB", ylim=(0, None))
        axis.legend()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
