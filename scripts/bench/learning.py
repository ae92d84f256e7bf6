"""Compare what GRPO's kin learn on a task at the edge of what SmolLM2-135M-Instruct can do.

learning.py MODEL TASK [--algorithms ...] [--seeds 1 2 3]       writes docs/benchmarks/learning-TASK-*.json

Runs share GPUs: `--at-once` on each of `--gpus`. A run takes about 11 GiB of GPU memory and two cores. The record is
written as each run ends; `--continue RECORD` takes over the runs that a record has, so that several calls make one
record, and `--only grpo:1 dapo:2` names some runs. Runs that last longer than `--limit` seconds are interrupted: they
are in the record with what they had measured, and are run again by a call that continues.
"""

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import record
from whole_runs import KNOWN_MODEL, model_key, run_in, tiny_run, tried

from nemo_rl_lite.rollout.rollout import interval
from nemo_rl_lite.rollout.store import read_rollout, rollout_files, step_of

ALGORITHMS = ("grpo", "dapo", "drgrpo", "cispo", "gspo")
EVERYWHERE = [
    *("logger.plots=false", "logger.show_samples_period=0", "checkpoint.save_period=0"),
    *("checkpoint.export_hf_at_end=false", "algorithm.val_temperature=0"),
    # No penalty for any of them: only GRPO's file has one.
    *("algorithm.loss_fn.reference_policy_kl_penalty=0.0", "policy.megatron_cfg.optimizer.lr=1.0e-5"),
]
SHARED_GPU = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "cluster.threads_per_worker=2"),
    *("algorithm.num_prompts_per_step=64", "algorithm.num_generations_per_prompt=8"),
    # Four optimizer steps per rollout: the algorithms differ in the later ones, where the ratio is no longer 1.
    *("policy.train_global_batch_size=128", "policy.sequence_packing.train_mb_tokens=6144"),
    "generation.colocated.sleep=false",
    # Where several engines start on a GPU at the same time, none can measure what is free.
    *("generation.vllm_cfg.gpu_memory_utilization=0.06", "+generation.vllm_kwargs.kv_cache_memory_bytes=2000000000"),
]
_NUMBER = [
    *('data.system_prompt="Answer with the number alone."', "data.validation_fraction=0.2", "reward=last_number"),
    *("generation.max_new_tokens=24", "policy.max_total_sequence_length=160"),
]
# Overrides of each task of reasoning-gym; a fifth of the distinct problems is never trained on.
TASKS = {
    "chain-sum-3": ["data.task=chain_sum", "data.task_kwargs={min_terms:3,max_terms:3,min_digits:1,max_digits:1}"],
    "products": ["data.task=products", "data.task_kwargs={min_terms:2,max_terms:2,min_digits:1,max_digits:2}"],
    "gcd": ["data.task=gcd", "data.task_kwargs={min_numbers:2,max_numbers:2,min_value:1,max_value:60}"],
    "lcm": ["data.task=lcm", "data.task_kwargs={min_numbers:2,max_numbers:2,min_value:1,max_value:30}"],
}
STAGGER_S = 2.0
"""Between two starts, because two that search a free port at the same time may find the same one."""
GRACE_S = 20.0
"""For a run that is interrupted at the limit to end."""
_WHEN_THE_PARENT_DIES = 1
"""Linux's number of PR_SET_PDEATHSIG."""
LAST = 10


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=6, help="runs at a time on a GPU")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--limit", type=float, default=560.0, help="seconds after which all runs are interrupted")
    parser.add_argument("--only", nargs="+", metavar="ALGORITHM:SEED", help="only these runs")
    parser.add_argument("--continue", dest="earlier", type=Path, metavar="RECORD", help="a record to continue")
    parser.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="of every run")
    compare(parser.parse_args(arguments))


def compare(given: argparse.Namespace) -> None:
    """Run every algorithm with every seed on the task, and keep the runs in the record as they end."""
    kept = json.loads(given.earlier.read_text())["runs"] if given.earlier else []
    done = {(run["algorithm"], run["seed"]) for run in kept if run["finished"]}
    wanted = [(name, seed) for seed in given.seeds for name in given.algorithms if (name, seed) not in done]
    if given.only:
        wanted = [(name, seed) for name, seed in wanted if f"{name}:{seed}" in given.only]
    runs = {(run["algorithm"], run["seed"]): run for run in kept}

    def keep(ended: Training) -> None:
        name, _, seed = ended.name.partition("-")
        own = run_of(ended.place, ended.process.returncode == 0, ended.seconds)
        one = {"algorithm": name, "seed": int(seed)} | own
        print(line(ended.name, one), flush=True)
        if one["validation"]:
            runs[name, int(seed)] = one
            print(write(given, list(runs.values())), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        todo = [Training(f"{name}-{seed}", overrides(given, name, seed), Path(folder)) for name, seed in wanted]
        run_together(todo, given.at_once, given.gpus, given.limit, keep)


def overrides(given: argparse.Namespace, algorithm: str, seed: int) -> list[str]:
    """Return the overrides of one run."""
    own = [*SHARED_GPU, *EVERYWHERE, "data=reasoning_gym", *_NUMBER, *TASKS[given.task], f"algorithm={algorithm}"]
    own += [f"algorithm.seed={seed}", model_key(given.model), f"algorithm.max_num_steps={given.steps}"]
    return [*own, "algorithm.val_period=10", "algorithm.max_val_samples=300", *given.override]


@dataclass
class Training:
    """A run of the command, in a folder of its name."""

    name: str
    overrides: Sequence[str]
    folder: Path
    """Of all trainings."""
    gpu: int = 0
    began: float = 0.0
    seconds: float = 0.0
    process: subprocess.Popen = field(init=False)

    def start(self, gpu: int, gpus: int) -> None:
        command = [sys.executable, "-m", "nemo_rl_lite.train", *self.overrides, f"hydra.run.dir={self.place}"]
        named = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        own = {"CUDA_VISIBLE_DEVICES": named[gpu] if named else str(gpu)} if gpus > 1 else {}
        with self._log.open("w") as log:
            pipes = {"stdout": log, "stderr": subprocess.STDOUT, "env": os.environ | own}
            self.process = subprocess.Popen(command, cwd=record.ROOT, preexec_fn=end_with_the_script, **pipes)
        self.gpu, self.began = gpu, time.monotonic()

    def end(self) -> None:
        """Note how long it took, and show why it failed, if it did."""
        self.seconds = time.monotonic() - self.began
        if status := self.process.returncode:
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])
            print(f"{self.name} ended with status {status} after {self.seconds:.0f} s:\n{end}", flush=True)
            for log in sorted(self.place.glob("logs/*.log")):
                last = log.read_text(errors="replace").splitlines()[-12:]
                print(f"--- the end of {log.name}", *last, sep="\n", flush=True)

    @property
    def place(self) -> Path:
        return self.folder / self.name

    @property
    def _log(self) -> Path:
        return self.folder / f"{self.name}.log"


def run_together(
    trainings: Sequence[Training], at_once: int, gpus: int, limit_s: float, report: Callable[[Training], None]
) -> None:
    """Run the trainings, `at_once` on each of `gpus` GPUs, and report each as it ends. After `limit_s` seconds none
    begins, and those that run are interrupted and reported with the steps they have."""
    waiting, running, last, until = list(trainings), list[Training](), 0.0, time.monotonic() + limit_s
    try:
        while running or (waiting and time.monotonic() < until):
            load = {gpu: sum(one.gpu == gpu for one in running) for gpu in range(max(gpus, 1))}
            gpu, now = min(load, key=load.__getitem__), time.monotonic()
            if now >= until:
                _interrupt(running)
            elif waiting and load[gpu] < at_once and now - last >= STAGGER_S:
                running.append(waiting.pop(0))
                running[-1].start(gpu, gpus)
                last = now
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                one.end()
                report(one)
            time.sleep(0.3)
    finally:
        _interrupt(running)


def end_with_the_script() -> None:
    """A script that is killed must leave no trainings behind, which would hold the GPUs."""
    ctypes.CDLL(None).prctl(_WHEN_THE_PARENT_DIES, signal.SIGTERM)


def _interrupt(running: Sequence[Training]) -> None:
    for one in running:
        one.process.send_signal(signal.SIGINT)
    for one in running:
        try:
            one.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            one.process.kill()  # what it has started ends with it
            one.process.wait()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics, as far as there are any."""
    metrics = folder / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def run_of(folder: Path, finished: bool, seconds: float) -> dict[str, Any]:
    """Return a run's held-out accuracies with their intervals over problems, its training rewards, and its seconds."""
    lines = metrics_of(folder)
    steps = [line for line in lines if "train/reward" in line]
    times = [line["timing/train/total_step_time"] for line in steps if "timing/train/total_step_time" in line]
    return {
        "finished": finished,
        "seconds": round(seconds, 1),
        "step_seconds": _rounded(statistics.median(times)) if times else None,
        "validation": _validations(folder, lines),
        "train_reward": [[line["step"], _rounded(line["train/reward"])] for line in steps],
    }


def line(name: str, run: dict[str, Any]) -> str:
    """A run in one line."""
    found, rewards = run["validation"], [reward for _, reward in run["train_reward"]]
    if not found or not rewards:
        return f"{name:40} nothing measured, {run['seconds']:.0f} s"
    first, last, best = found[0], found[-1], max(one["accuracy"] for one in found)
    parts = [
        f"held out {_shown(first)} -> {_shown(last)} of {last['problems']}, best {best:.3f}",
        f"always the same answer {first['commonest_answer']:.3f}",
        f"reward {rewards[0]:.3f} -> {statistics.mean(rewards[-LAST:]):.3f}",
        f"{len(rewards)} steps of {run['step_seconds']:.2f} s, {run['seconds']:.0f} s in all",
        *([] if run["finished"] else ["NOT FINISHED"]),
    ]
    return f"{name:28} {', '.join(parts)}"


def write(given: argparse.Namespace, runs: Sequence[dict[str, Any]]) -> Path:
    """Write the record learning-TASK with all its runs, and the summary of those that have finished."""
    results = []
    for name in dict.fromkeys(run["algorithm"] for run in runs):
        own = [run for run in runs if run["algorithm"] == name and run["finished"]]
        results += summary(name, own) if own else []
    more = {"task": given.task, "steps": given.steps, "runs": list(runs)}
    note = f"model: {given.model.name}, {given.steps} steps; greedy, at most 300 held-out problems"
    return record.write(f"learning-{given.task}", results, [], note, more)


def summary(name: str, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    config = f"{name}, seeds {','.join(str(run['seed']) for run in runs)}"
    last = [statistics.mean(reward for _, reward in run["train_reward"][-LAST:]) for run in runs]
    return [
        record.result("held-out accuracy before", config, "share", [run["validation"][0]["accuracy"] for run in runs]),
        record.result("held-out accuracy after", config, "share", [run["validation"][-1]["accuracy"] for run in runs]),
        record.result(
            "share of the most common answer",
            config,
            "share",
            [run["validation"][0]["commonest_answer"] for run in runs],
        ),
        record.result(f"mean reward of the last {LAST} steps", config, "share", last),
        record.result("step time, several runs on the GPU", config, "s", [run["step_seconds"] for run in runs]),
    ]


def _validations(folder: Path, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a validation's step, accuracy, problems, and 95 % interval over problems, by the responses on disk."""
    files = {step_of(file): file for file in rollout_files(folder) if file.stem.endswith("-validation")}
    validated = [line for line in lines if "validation/accuracy" in line and line["step"] in files]
    return [_validation(line, read_rollout(files[line["step"]])) for line in validated]


def _validation(line: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One response to each problem, greedy: right with a reward of 1."""
    right = [float(row["reward"] >= 1) for row in rows]
    most = Counter(row["answer"] for row in rows).most_common(1)[0][1]
    return {
        "step": line["step"],
        "accuracy": _rounded(statistics.mean(right)),
        "interval": [_rounded(end) for end in interval(right, [1] * len(right))],
        "reward": _rounded(line["validation/accuracy"]),
        "problems": len(right),
        "length": _rounded(line["validation/avg_length"]),
        # What always giving the same answer would reach.
        "commonest_answer": _rounded(most / len(right)),
        # Of each problem, in the same order in all runs of a task.
        "right": "".join("1" if one else "0" for one in right),
    }


def _shown(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    return f"{one['accuracy']:.3f} ({low:.3f} to {high:.3f})"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def trial() -> None:
    """Compose a run of each algorithm, and keep a run's validation, responses and rewards in a record."""
    given = argparse.Namespace(model=Path(KNOWN_MODEL), task="gcd", steps=8, override=[])
    with tried(), tempfile.TemporaryDirectory() as folder:
        for name in ALGORITHMS:
            run_in(Path(folder) / name, overrides(given, name, 1))
    run = run_of(tiny_run(), True, 1.0)
    print(line("grpo-1", run))
    print(write(given, [{"algorithm": "grpo", "seed": 1} | run]))


if __name__ == "__main__":
    record.start(main, trial)
