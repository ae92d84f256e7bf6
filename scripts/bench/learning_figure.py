"""Draw the records of learning.py: held-out accuracy over steps, a panel a task, a colour an algorithm."""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import record

from nemo_rl_lite.rollout.rollout import interval

PICTURE = record.ROOT / "docs" / "images" / "learning.svg"
NAMES = {"grpo": "GRPO", "dapo": "DAPO", "drgrpo": "Dr. GRPO", "cispo": "CISPO", "gspo": "GSPO"}
COLOURS = dict(zip(NAMES, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"), strict=True))
_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's 97.5 % quantile by degrees of freedom, from 1; more have smaller ones."""
Record = dict[str, Any]


def drawn(records: Sequence[Record]) -> list[Record]:
    """The records with a run that has finished."""
    return [one for one in records if one["bench"].startswith("learning-") and any(map(_finished, one.get("runs", [])))]


def is_stale(records: Sequence[Record]) -> bool:
    """Whether the picture shows other runs than the records have, or is missing where they have some."""
    if not drawn(records):
        return PICTURE.exists()
    found = re.search(r"runs ([0-9a-f]{16})", PICTURE.read_text()) if PICTURE.exists() else None
    return found is None or found[1] != _digest(records)


def draw(records: Sequence[Record]) -> None:
    """Draw the picture, with a digest of the runs that it shows; remove it where there are none."""
    PICTURE.unlink(missing_ok=True)
    if not (tasks := drawn(records)):
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.hashsalt": "learning", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(
        1, len(tasks), figsize=(max(4.2 * len(tasks), 6.4), 3.4), layout="constrained", squeeze=False
    )
    for axis, one in zip(axes[0], tasks, strict=True):
        _panel(axis, one)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    about = {"Date": None, "Creator": None, "Description": f"runs {_digest(records)}"}
    figure.savefig(PICTURE, metadata=about)
    pyplot.close(figure)


def table(records: Sequence[Record], folder: str) -> list[str]:
    """The picture and a row for each task and algorithm, as Markdown; nothing without a run that has finished."""
    tasks = drawn(records)
    if not tasks:
        return []
    model, steps = tasks[0]["note"].split(",")[0].removeprefix("model: "), sorted({one["steps"] for one in tasks})
    where = ", ".join(
        f"[{_title(one)}]({folder}benchmarks/{one['bench']}-{one['hardware']['name']}.json)" for one in tasks
    )
    lines = [
        f"Greedy accuracy of {model} on held-out problems of reasoning-gym ({where}) after "
        f"{' or '.join(map(str, steps))} steps of each algorithm. All use one learning rate, no KL penalty and four "
        "optimizer steps per rollout. Curves are means over seeds, and bands span minimum to maximum. A constant "
        f"answer scores {_constant(tasks)}. The last column is Student's interval with a seed as one observation.",
        "",
        f"![Held-out accuracy by algorithm over training steps]({folder}images/learning.svg)",
        "",
        "| task | algorithm | seeds | before | after (95 % interval over problems) | 95 % interval over seeds |",
        "|---|---|---:|---:|---:|---:|",
    ]
    return lines + [row for one in tasks for row in _rows(one)]


def _constant(tasks: Sequence[Record]) -> str:
    """Return the accuracy of the most common answer of each task."""
    shares = (next(iter(_by_algorithm(one).values()))[0]["validation"][0]["commonest_answer"] for one in tasks)
    return " or ".join(f"{share:.3f}" for share in shares)


def over_seeds(runs: Sequence[dict[str, Any]], place: int) -> tuple[float, float, float]:
    """Mean accuracy of validations at `place` (0 the first, -1 the last), and its 95 % interval over problems:
    the mean of the runs is one observation of a problem."""
    rights = [run["validation"][place]["right"] for run in runs]
    means = [sum(map(int, of_problem)) / len(rights) for of_problem in zip(*rights, strict=True)]
    return mean(means), *interval(means, [1] * len(means))


def interval_of_seeds(runs: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean accuracy in the end, with a run as one observation; None with a single run.
    It is wide where there are few."""
    ends = [run["validation"][-1]["accuracy"] for run in runs]
    if len(ends) == 1:
        return None
    quantile = _QUANTILES[min(len(ends) - 1, len(_QUANTILES)) - 1]
    half = quantile * stdev(ends) / math.sqrt(len(ends))
    middle = mean(ends)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _rows(one: Record) -> list[str]:
    rows = []
    for name, runs in _by_algorithm(one).items():
        before, (after, low, high) = over_seeds(runs, 0)[0], over_seeds(runs, -1)
        of_seeds = interval_of_seeds(runs)
        rows.append(
            f"| {_title(one)} | {NAMES[name]} | {len(runs)} | {before:.3f} | {after:.3f} ({low:.3f} to {high:.3f}) "
            f"| {f'{of_seeds[0]:.3f} to {of_seeds[1]:.3f}' if of_seeds else ''} |"
        )
    return rows


def _panel(axis: Any, one: Record) -> None:
    for name, runs in _by_algorithm(one).items():
        curves = [{point["step"]: point["accuracy"] for point in run["validation"]} for run in runs]
        steps = sorted(set.intersection(*map(set, curves)))
        found = [[curve[step] for curve in curves] for step in steps]
        axis.plot(steps, list(map(mean, found)), label=NAMES[name], color=COLOURS[name], linewidth=1.6)
        axis.fill_between(steps, list(map(min, found)), list(map(max, found)), color=COLOURS[name], alpha=0.15, lw=0)
    first = next(iter(_by_algorithm(one).values()))[0]["validation"][0]
    axis.axhline(first["commonest_answer"], color="grey", linestyle=":", linewidth=1, label="always the same answer")
    axis.set(title=f"{_title(one)}, {first['problems']} held-out problems", xlabel="step")
    axis.set(ylabel="held-out accuracy, greedy", ylim=(0, None))
    axis.grid(alpha=0.3)


def _by_algorithm(one: Record) -> dict[str, list[dict[str, Any]]]:
    runs = [run for run in one["runs"] if _finished(run)]
    return {name: own for name in NAMES if (own := [run for run in runs if run["algorithm"] == name])}


def _finished(run: dict[str, Any]) -> bool:
    return run["finished"]


def _title(one: Record) -> str:
    return one["task"].replace("-", " ")


def _digest(records: Sequence[Record]) -> str:
    shown = [[one["task"], one["runs"]] for one in drawn(records)]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]
