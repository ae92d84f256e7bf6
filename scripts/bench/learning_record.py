"""What one training of learning.py has learned, and the records of several."""

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record
from together import Ended

from nemo_rl_lite.rollout.episode import interval
from nemo_rl_lite.rollout.store import read_rollout, rollout_files, step_of

LAST = 10
_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's 97.5 % quantile by degrees of freedom, from 1; more have smaller ones."""


def run_of(ended: Ended) -> dict[str, Any]:
    """The run's held-out accuracies with their intervals over problems, its training rewards, and its seconds."""
    steps = [line for line in ended.lines if "train/reward" in line]
    times = [line["timing/train/total_step_time"] for line in steps if "timing/train/total_step_time" in line]
    return {
        "finished": ended.status == 0,
        "seconds": round(ended.seconds, 1),
        "step_seconds": _rounded(statistics.median(times)) if times else None,
        "validation": _validations(ended),
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


def earlier(path: Path) -> list[dict[str, Any]]:
    """The runs of a record."""
    return json.loads(path.read_text())["runs"]


def write(task: str, given: argparse.Namespace, runs: Sequence[dict[str, Any]]) -> Path:
    """Write the record learning-TASK with all its runs, and the summary of those that have finished."""
    results = []
    for name in dict.fromkeys(run["algorithm"] for run in runs):
        own = [run for run in runs if run["algorithm"] == name and run["finished"]]
        results += summary(name, own) if own else []
    steps = f"{given.steps} steps; greedy, at most {given.problems} held-out problems"
    more = {"task": task, "steps": given.steps, "runs": list(runs)}
    return record.write(f"learning-{task}", results, [], f"model: {given.model.name}, {steps}", more)


def summary(name: str, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    config = f"{name}, seeds {','.join(str(run['seed']) for run in runs)}"
    last = [statistics.mean(reward for _, reward in run["train_reward"][-LAST:]) for run in runs]
    return [
        record.result("held-out accuracy before", config, "share", [run["validation"][0]["accuracy"] for run in runs]),
        record.result("held-out accuracy after", config, "share", [run["validation"][-1]["accuracy"] for run in runs]),
        record.result(
            "the commonest answer's share", config, "share", [run["validation"][0]["commonest_answer"] for run in runs]
        ),
        record.result(f"mean reward of the last {LAST} steps", config, "share", last),
        record.result("step, several runs on the GPU", config, "s", [run["step_seconds"] for run in runs]),
    ]


def _validations(ended: Ended) -> list[dict[str, Any]]:
    """A validation's step, accuracy, problems, and the 95 % interval over problems, by the responses on disk."""
    files = {step_of(file): file for file in rollout_files(ended.folder) if file.stem.endswith("-validation")}
    found = []
    for line in ended.lines:
        if "validation/accuracy" in line and line["step"] in files:
            found.append(_validation(line, read_rollout(files[line["step"]])))
    return found


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


def over_seeds(runs: Sequence[dict[str, Any]], place: int) -> tuple[float, float, float]:
    """Mean accuracy of validations at `place` (0 the first, -1 the last), and its 95 % interval over problems:
    the mean of the runs is one observation of a problem."""
    rights = [run["validation"][place]["right"] for run in runs]
    means = [sum(map(int, of_problem)) / len(rights) for of_problem in zip(*rights, strict=True)]
    return statistics.mean(means), *interval(means, [1] * len(means))


def interval_of_seeds(runs: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean accuracy in the end, with a run as one observation; None with a single run.
    It is wide where there are few."""
    ends = [run["validation"][-1]["accuracy"] for run in runs]
    if len(ends) == 1:
        return None
    quantile = _QUANTILES[min(len(ends) - 1, len(_QUANTILES)) - 1]
    half = quantile * statistics.stdev(ends) / math.sqrt(len(ends))
    mean = statistics.mean(ends)
    return max(mean - half, 0.0), min(mean + half, 1.0)


def _shown(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    return f"{one['accuracy']:.3f} ({low:.3f} to {high:.3f})"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
