"""Kill processes of long runs at random, and check what is left: soak.py {sync|async|workers|faults} [STEPS] [FOLDER]

About every 25 seconds, at a random moment, SIGKILL hits an engine, a policy rank, the launcher, Ray's gcs_server or
raylet, or the launcher's whole process group, also while the run is starting. Where the run's command ends, the script
gives the same command again. Runs are on CPUs.

sync: 150 steps with kills and 150 without must end with the same weights, bit for bit. A third run, undisturbed and
three times as long, shows the resident memory of every process after each step.
async: two engines, `algorithm.rollouts.source=queue` and new weights in flight. The samples that the run has written,
its metrics and its last checkpoint are compared with the training data: no prompt may be missing, and none may be there
twice. An engine holds only two requests at a time, so rollouts are in flight at almost every moment.

workers: async with two rollout workers, which are killed too.
faults: two policy ranks, an engine and a rollout worker. In 300 steps, 30 kills hit them and the launcher, one in each
ten steps. The weights must be bitwise those of an undisturbed run.
"""

import json
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
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import record
from safetensors.torch import load_file
from whole_runs import KNOWN_MODEL

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.formats import problems
from nemo_rl_lite.data.sources import training_set
from nemo_rl_lite.rollout.store import ROLLOUTS, read_rollout, step_of
from nemo_rl_lite.validation.compose import compose_config

KILL_EVERY_S, SAVE_EVERY = 25.0, 5
# The share of kills that fall due before a step has followed the last one, and are done.
HIT_A_START = 0.25
# Kills of workers at a start may end one or two commands without a step.
MOST_FRUITLESS = 3
MAX_AGE, PROMPTS = 2, 8
ASYNC = (
    *("algorithm.rollouts.source=queue", f"algorithm.rollouts.max_trajectory_age_steps={MAX_AGE}"),
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
    *("generation.colocated.enabled=false", "generation.data_parallel_size=2", "generation.vllm_cfg.max_num_seqs=2"),
    "algorithm.max_val_samples=16",
)
ROLLOUT_WORKERS = (*ASYNC, "algorithm.rollouts.num_workers=2")
WORKERS, OF_RAY = ("generation-0", "policy-0"), ("gcs_server", "raylet")
OF_THE_COMMAND = ("launcher", *OF_RAY, "process group")
TWO_RANKS = (
    *("cluster.cpu_ranks=2", "policy.train_micro_batch_size=32", "policy.logprob_batch_size=32"),
    *("generation.colocated.enabled=false", "algorithm.rollouts.num_workers=1"),
)
# Steps to a kill of `faults`.
STEPS_TO_A_KILL = 10
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
    others: tuple[str, ...] = OF_THE_COMMAND
    """Other processes that may be killed."""
    kill_every_s: float = KILL_EVERY_S
    hit_a_start: float = HIT_A_START
    kill_after: Sequence[int] = ()
    """Steps that a kill follows within a step's time; empty: kills do not depend on steps."""
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    step_s: list[float] = field(default_factory=list)
    kills: list[tuple[str, float]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    """Processes of the command that a kill has ended."""
    survived: int = 0
    """Kills that a finished step has followed."""
    fruitless: int = 0
    """Commands since the last step that have ended by themselves."""
    next_faults: list[str] = field(default_factory=list)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def faults(self) -> tuple[str, ...]:
        """What may be killed."""
        return (*self.workers, *self.others)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "nemo_rl_lite.train", *self.settings()]

    def settings(self) -> list[str]:
        """Return the overrides of the run."""
        return [
            *(f"hydra.run.dir={self.folder}", f"algorithm.max_num_steps={self.steps}"),
            *(f"algorithm.num_prompts_per_step={PROMPTS}", "policy.train_global_batch_size=64"),
            *("policy.train_micro_batch_size=64", "policy.logprob_batch_size=64", "algorithm.val_period=0"),
            *(f"checkpoint.save_period={SAVE_EVERY}", "cluster.max_restarts=1000", "logger.plots=false"),
            *self.overrides,
        ]

    def recovered(self) -> list[dict[str, Any]]:
        """The seconds from each kill to the end of the next step, as results of a record."""
        kinds = sorted(self.recovery_s.items())
        which = self.folder.name
        return [record.result(f"from a killed {kind} to the next step's end", which, "s", own) for kind, own in kinds]

    def run(self) -> None:
        """Run until the last step is done; fail where the run ends without a kill."""
        done = threading.Event()
        self._process = self._start()
        due = list(self.kill_after)
        if self.dice and not due:
            threading.Thread(target=self._disturb, args=(self.dice, done), daemon=True).start()
        while True:
            for at, step, seconds in _steps(self._process):
                self._note_memory(self._process.pid, step)
                self.step_s.append(seconds)
                self.fruitless = 0
                with self._counting:
                    for name, killed_at in self.kills[self.survived :]:
                        self.recovery_s[name].append(at - killed_at)
                        self.survived += 1
                if self.dice and due and step >= due[0]:
                    due.pop(0)
                    threading.Timer(self.dice.uniform(0, seconds), self._strike, [self.dice]).start()
            status = self._process.wait()
            if status == 0:
                break
            print(f"the command ended with status {status}", flush=True)
            if self.survived == len(self.kills) and self._process.pid not in self.ended:
                done.set()
                sys.exit(f"the run in {self.folder} ended with status {status}, and nothing was killed")
            if self._process.pid not in self.ended:
                self.fruitless += 1
            if self.fruitless == MOST_FRUITLESS:
                done.set()
                sys.exit(f"{self.fruitless} commands in {self.folder} have ended, and none of them has done a step")
            self._process = self._start()
        done.set()

    def _disturb(self, dice: random.Random, done: threading.Event) -> None:
        while not done.wait(self.kill_every_s * dice.uniform(0.8, 1.2)):
            # A start takes most of 25 seconds: were each one hit, no step would ever be done.
            if len(self.kills) == self.survived or dice.random() <= self.hit_a_start:
                self._strike(dice)

    def _strike(self, dice: random.Random) -> None:
        """Kill a process: every kind in a random order, then again."""
        self.next_faults = self.next_faults or dice.sample(self.faults, len(self.faults))
        name, process = self.next_faults.pop(), self._process
        # A step's line meanwhile must not count a kill that may fail.
        with self._counting:
            # Before the command can end of it.
            self.kills.append((name, time.monotonic()))
            if name in ("launcher", "process group"):
                self.ended.add(process.pid)
            try:
                self._kill(name, process)
            except (LookupError, OSError, StopIteration, psutil.NoSuchProcess):
                self.kills.pop()
                print(f"{name} was not there to be killed", flush=True)
                return
        print(f"killed {name}", flush=True)

    def _start(self) -> "subprocess.Popen[str]":
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        log = (self.folder.parent / f"{self.folder.name}.err").open("a")
        # In a session, and so a process group, of its own.
        pipes = {"stdout": subprocess.PIPE, "stderr": log, "text": True, "start_new_session": True}
        return subprocess.Popen(self.command(), cwd=record.ROOT, **pipes)

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


def main(arguments: list[str]) -> None:
    match arguments:
        case ["sync" | "async" | "workers" | "faults" as kind, *rest]:
            steps = int(rest[0]) if rest else {"sync": 150, "faults": 300}.get(kind, 200)
            folder = Path(rest[1] if len(rest) > 1 else tempfile.mkdtemp())
            engines = *WORKERS, "generation-1"
            if kind == "sync":
                soak_sync(steps, folder)
            elif kind == "faults":
                soak_faults(steps, folder)
            elif kind == "async":
                soak_async("async-soak", steps, folder, ASYNC, engines)
            else:
                soak_async("plane-soak", steps, folder, ROLLOUT_WORKERS, (*engines, "rollouts-0", "rollouts-1"))
        case _:
            sys.exit(__doc__)


def soak_sync(steps: int, folder: Path) -> None:
    calm = Soak(folder / "undisturbed", steps, None)
    rough = Soak(folder / "disturbed", steps, random.Random(0))
    long = Soak(folder / "long", 3 * steps, None)
    results, clocks = [], {}
    for soak in (calm, rough, long):
        started = time.monotonic()
        soak.run()
        clocks[soak.folder.name] = time.monotonic() - started
        results.append(record.result("end to end", soak.folder.name, "s", [clocks[soak.folder.name]]))
        results.append(record.result("step time", soak.folder.name, "s", [statistics.median(soak.step_s)]))
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


def soak_faults(steps: int, folder: Path) -> None:
    dice, kills = random.Random(0), steps // STEPS_TO_A_KILL
    own = TWO_RANKS, ("generation-0", "policy-0", "policy-1", "rollouts-0"), ("launcher",)
    after = [STEPS_TO_A_KILL * number + dice.randint(1, STEPS_TO_A_KILL - 1) for number in range(kills)]
    calm = Soak(folder / "undisturbed", steps, None, *own)
    rough = Soak(folder / "disturbed", steps, dice, *own, kill_after=after)
    results = []
    for soak in (calm, rough):
        started = time.monotonic()
        soak.run()
        results.append(record.result("end to end", soak.folder.name, "s", [time.monotonic() - started]))
    results += [
        *rough.recovered(),
        record.result("kills", "disturbed", "", [len(rough.kills)]),
        record.result("steps taken again", "disturbed", "", [len(_series(rough.folder, "train/loss", "-undone"))]),
    ]
    bars = [
        record.bar("steps", steps, 300, at_least=True),
        record.bar("kills that steps have followed", rough.survived, 30, at_least=True),
        record.bar("kinds of processes that were killed", len(rough.recovery_s), len(rough.faults), at_least=True),
        record.bar("same weights", float(_same_weights(calm.folder, rough.folder)), 1, at_least=True),
    ]
    sys.stdout.write(record.write("faults-soak", results, bars).read_text())


def soak_async(name: str, steps: int, folder: Path, overrides: tuple[str, ...], workers: tuple[str, ...]) -> None:
    # A start takes half a minute or more, so some of the starts are hit.
    dice, moments = random.Random(0), {"kill_every_s": 30.0, "hit_a_start": 0.15}
    soak = Soak(folder / "async", steps, dice, overrides, workers, **moments)
    started = time.monotonic()
    soak.run()
    results = [record.result("end to end", "async", "s", [time.monotonic() - started]), *soak.recovered()]
    trained, repeated = samples_of(soak.folder, ROLLOUTS), samples_of(soak.folder, f"{ROLLOUTS}-undone")
    wanted = Counter(_prompts(PROMPTS * steps))
    found = Counter(prompt for own in trained.values() for prompt in own)
    ages = dict(_series(soak.folder, "train/trajectory_age_max"))
    saved = json.loads((soak.folder / "checkpoints" / f"step-{steps:08d}" / "checkpoint.json").read_text())
    left = saved["record"]["rollouts"]
    results += [
        record.result("kills", "async", "", [len(soak.kills)]),
        record.result("steps taken again", "async", "", [len(_series(soak.folder, "train/loss", "-undone"))]),
        record.result("prompts trained", "async", "", [found.total()]),
        record.result("maximum staleness", "async", "steps", list(ages.values())),
    ]
    others = sum(own != trained[step] for step, own in repeated.items())
    unused = len(left["ahead"]) + len(left.get("returned", ())) + abs(left["position"] - PROMPTS * steps)
    bars = [
        record.bar("steps in the end", len(trained.keys() & ages.keys() & set(range(1, steps + 1))), steps, True),
        record.bar("steps asked for", steps, 200, at_least=True),
        record.bar("kinds of processes that were killed", len(soak.recovery_s), len(soak.faults), at_least=True),
        record.bar("prompts trained twice", (found - wanted).total(), 0, at_least=False),
        record.bar("prompts lost", (wanted - found).total(), 0, at_least=False),
        record.bar("steps that had other prompts when they were taken again", others, 0, at_least=False),
        record.bar("places in the data that the last checkpoint counts otherwise", unused, 0, at_least=False),
        record.bar("largest age of a token in steps", max(ages.values()), MAX_AGE, at_least=False),
    ]
    sys.stdout.write(record.write(name, results, bars).read_text())


def samples_of(folder: Path, name: str) -> dict[int, list[str]]:
    """Return the prompts of each step that a run has trained on, in their order, from one of its folders of samples."""
    # Rollout workers write further files, which `read_rollout` joins.
    files = [file for file in sorted((folder / name).glob("step-*-train.parquet")) if file.stem.count("-") == 2]
    return {step_of(file): [row["prompt"][-1]["content"] for row in _first_samples(file)] for file in files}


def _first_samples(file: Path) -> Iterable[dict]:
    return (row for row in read_rollout(file) if row["sample"] == 0)


def _prompts(count: int) -> list[str]:
    """Return the prompts at the first `count` positions of the training data."""
    config = compose_config()
    training = training_set(config.data, config.options(GRPOConfig).seed, problems(()))
    return [training.problem(position).messages[-1]["content"] for position in range(count)]


def _series(folder: Path, name: str, which: str = "") -> list[tuple[int, float]]:
    """Return the steps and values of a metric of a run."""
    file = folder / f"metrics{which}.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [(line["step"], line[name]) for line in lines if name in line]


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


# What a run prints and logs, and where it goes on after a kill.
SCRIPTED = """
import os, pathlib, sys, time
folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
(folder / "logs").mkdir(parents=True, exist_ok=True)
for worker in ("generation-0", "policy-0"):
    (folder / "logs" / f"{worker}.log").write_text(f"process {os.getpid()}")
done = folder / "done"
for step in range(int(done.read_text()) + 1 if done.exists() else 1, steps + 1):
    time.sleep(0.05)
    # A kill in between leaves the one before.
    (folder / "next").write_text(str(step))
    (folder / "next").replace(done)
    print(f"step {step:3}/{steps} reward 0.5 0.1 s ", flush=True)
"""


def trial() -> None:
    """Kill processes of scripted runs, at random moments and after given steps, and compose the real ones."""

    class Scripted(Soak):
        def command(self) -> list[str]:
            return [sys.executable, "-c", SCRIPTED, str(self.folder), str(self.steps)]

    with tempfile.TemporaryDirectory() as folder:
        for own in ((), ASYNC, ROLLOUT_WORKERS, TWO_RANKS):
            compose_config([f"policy.model_name={KNOWN_MODEL}", *Soak(Path(folder), 2, None, own).settings()[1:]])
        moments = {"kill_every_s": 0.3, "hit_a_start": 0.0}
        soak = Scripted(Path(folder) / "scripted", 60, random.Random(0), workers=(), **moments)
        by_step = Scripted(
            Path(folder) / "by-step", 30, random.Random(0), (), (), ("launcher",), kill_after=[9, 14, 20]
        )
        for one in (soak, by_step):
            one.run()
    if not soak.kills or len(soak.step_s) < 60 - len(soak.kills):
        sys.exit(f"{len(soak.kills)} kills, {len(soak.step_s)} steps")
    if by_step.survived != 3:
        sys.exit(f"{by_step.survived} of 3 kills")
    print(record.write("soak", soak.recovered(), []))


if __name__ == "__main__":
    record.start(main, trial)
