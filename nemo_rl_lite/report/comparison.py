"""Compare two groups of runs on the problems that all of them answered.

Shapes: R runs of a group, P problems, or P = 1 for a number of the whole run.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.errors import UsageError
from nemo_rl_lite.observability.environment import CONFIG_FILE
from nemo_rl_lite.observability.runs import is_run, read_json
from nemo_rl_lite.report.record import metrics_by_step
from nemo_rl_lite.report.verdict import Difference, difference
from nemo_rl_lite.rollout.store import read_rollout, rollout_files, step_of

Problem = tuple[str, str, str]
"""Source, prompt and answer."""
# Keys that differ between any two runs, or say nothing about the training.
_IGNORED = ("algorithm.seed", "run_name", "logger.", "checkpoint.", "cluster.", "profile.")


@dataclass(frozen=True)
class Quantity:
    """Compared result of runs. `better`: 1 if more is better, -1 if less is, 0 if neither."""

    name: str
    better: int
    of_sample: Callable[[Mapping[str, Any]], float | None] | None = None
    """Value of a validation sample; None if it failed."""
    metric: str = ""
    """Metric of runs without validation samples."""


QUANTITIES = (
    Quantity("held-out reward", 1, lambda row: row["reward"], "validation/accuracy"),
    Quantity("response tokens", 0, lambda row: float(row["tokens"]), "validation/avg_length"),
    Quantity("held-out loss", -1, None, "validation/val_loss"),
)


@dataclass(frozen=True)
class Compared:
    """The difference of one quantity. `problems`: the number of problems; 0 for a number of the whole run."""

    quantity: Quantity
    problems: int
    difference: Difference | None
    """None: one number per group, which has no interval."""
    base: float
    new: float

    @property
    def verdict(self) -> str:
        """Return better, worse, more, fewer, or undecided."""
        sign = 0 if self.difference is None else self.difference.sign
        if not sign:
            return "undecided"
        if not self.quantity.better:
            return "more" if sign > 0 else "fewer"
        return "better" if sign == self.quantity.better else "worse"


@dataclass(frozen=True)
class Comparison:
    """All differences of two groups of runs after one step."""

    step: int
    compared: list[Compared]
    left_out: int
    """Number of problems that some runs did not answer."""
    keys: dict[str, tuple[Any, Any]]
    """Keys that have one value in each group, and differ between them."""
    mixed: list[str]
    """Keys that differ within a group."""
    repeated: bool
    """True if runs of a group have the same seed, so that they are not independent."""


def compare(base: Sequence[Path], new: Sequence[Path], step: int | None = None) -> Comparison:
    """Compare runs or evaluations after a validated step; None: the last one that all of them have.

    Raises:
        UsageError: they have no validation in common, or no common problem; or a folder is in both groups, or only some
            are evaluations.
    """
    folders = [*base, *new]
    if both := set(base) & set(new):
        raise UsageError(f"{min(both)} is in both groups: name it once")
    if len(set(map(is_run, folders))) > 1:
        # The samples of an evaluation have the step 0, as those of a run before training.
        raise UsageError("some are runs and some evaluations: evaluate the models of all runs, with the same command")
    step = _common_step(folders, step)
    samples = [_samples(folder, step) for folder in folders]
    compared, left_out = [], 0
    if all(samples):
        common = sorted(set.intersection(*(set(one) for one in samples)))
        left_out = len(set.union(*(set(one) for one in samples))) - len(common)
        if not common:
            raise UsageError("the runs have no held-out problem in common: compare them on the same data")
        for quantity in QUANTITIES:
            if of_sample := quantity.of_sample:
                values_RP = np.array([_means(one, common, of_sample) for one in samples])
                known_P = ~np.isnan(values_RP).any(axis=0)
                if known_P.any():
                    compared.append(_compared(quantity, values_RP[:, known_P], len(base), int(known_P.sum())))
    else:
        for quantity in QUANTITIES:
            found = [_metrics(folder).get(step, {}).get(quantity.metric) for folder in folders]
            if all(one is not None for one in found):
                compared.append(_compared(quantity, np.array(found, float)[:, None], len(base), 0))
    if not compared:
        raise UsageError(f"the runs have no validation samples and no common validation metric of step {step}")
    between, within = _differing([_config(one) for one in folders], len(base))
    return Comparison(step, compared, left_out, between, within, _has_equal_seeds(base) or _has_equal_seeds(new))


def _compared(quantity: Quantity, values_RP: np.ndarray, of_base: int, problems: int) -> Compared:
    base_RP, new_RP = values_RP[:of_base], values_RP[of_base:]
    try:
        found = difference(base_RP, new_RP)
    except ValueError:
        found = None
    return Compared(quantity, problems, found, float(base_RP.mean()), float(new_RP.mean()))


def _common_step(folders: Sequence[Path], asked: int | None) -> int:
    steps = [_validated(folder) for folder in folders]
    for folder, own in zip(folders, steps, strict=True):
        if not own:
            raise UsageError(f"{folder}: no validation yet")
        if asked is not None and asked not in own:
            raise UsageError(f"{folder}: no validation after step {asked}; it has {', '.join(map(str, sorted(own)))}")
    if common := set.intersection(*steps):
        return max(common) if asked is None else asked
    raise UsageError(
        "the runs have no validated step in common: set algorithm.val_period alike, or compare evaluations"
    )


def _validated(folder: Path) -> set[int]:
    of_samples = {step_of(file) for file in _validations(folder)}
    names = {one.metric for one in QUANTITIES}
    return of_samples or {step for step, values in _metrics(folder).items() if names & set(values)}


def _validations(folder: Path) -> list[Path]:
    return [file for file in rollout_files(folder) if file.stem.endswith("-validation")]


def _samples(folder: Path, step: int) -> dict[Problem, list[dict[str, Any]]]:
    """Read a validation's samples by problem; empty without their file."""
    found: dict[Problem, list[dict[str, Any]]] = {}
    for file in _validations(folder):
        if step_of(file) == step:
            try:
                rows = read_rollout(file)
            except (OSError, pa.ArrowException) as error:
                raise UsageError(f"{file}: cannot be read: {error}") from error
            for row in rows:
                prompt = json.dumps([(one["role"], one["content"]) for one in row["prompt"]])
                found.setdefault((row.get("source") or "", prompt, row["answer"]), []).append(row)
    return found


def _means(
    samples: Mapping[Problem, Sequence[Mapping[str, Any]]],
    problems: Sequence[Problem],
    of_sample: Callable[[Mapping[str, Any]], float | None],
) -> list[float]:
    """Return the mean of each problem's samples: NaN if all failed."""
    values = ([one for one in map(of_sample, samples[problem]) if one is not None] for problem in problems)
    return [fmean(one) if one else float("nan") for one in values]


@cache
def _metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step. Raises UsageError: the folder has no run."""
    if not is_run(folder):
        raise UsageError(f"{folder}: neither a run nor an evaluation")
    return metrics_by_step(folder)


def _has_equal_seeds(folders: Sequence[Path]) -> bool:
    seeds = [read_json(folder / CONFIG_FILE).get("algorithm", {}).get("seed") for folder in folders]
    return None not in seeds and len(set(seeds)) < len(seeds)


def _config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run, by key; empty for an evaluation."""
    return {key: value for key, value in flatten(read_json(folder / CONFIG_FILE)) if not key.startswith(_IGNORED)}


def _differing(configs: Sequence[Mapping[str, Any]], of_base: int) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """Return the keys that differ between the groups, and those that differ within one; none with evaluations."""
    if not all(configs):
        return {}, []
    base, new = configs[:of_base], configs[of_base:]
    between, within = {}, []
    for key in dict.fromkeys(key for one in configs for key in one):
        values = [[one.get(key) for one in group] for group in (base, new)]
        if any(one != group[0] for group in values for one in group):
            within.append(key)
        elif values[0][0] != values[1][0]:
            between[key] = (values[0][0], values[1][0])
    return between, within


def rows(found: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield a table's rows: quantity, base, new, difference, 95 % interval, verdict."""
    for one in found.compared:
        apart, interval = f"{one.new - one.base:+.3g}", "none"
        if one.difference is not None:
            interval = f"{one.difference.low:+.3g} to {one.difference.high:+.3g}"
        yield one.quantity.name, f"{one.base:.4g}", f"{one.new:.4g}", apart, interval, one.verdict


def sentences(found: Comparison, runs: Sequence[int]) -> Iterator[str]:
    """Yield what else is worth knowing. `runs`: the number of runs of each group."""
    for one in found.compared:
        if one.difference is None:
            yield f"{one.quantity.name}: one number per group has no interval: train each group with more seeds"
        elif one.verdict == "undecided" and one.quantity.better:
            yield f"{one.quantity.name}: {_missing(one.difference, runs)}"
    if max(runs) == 1:
        yield "one run per group: the intervals cover other problems, not other seeds"
    if found.left_out:
        yield f"{found.left_out} problems are left out, because some runs did not answer them"
    if found.repeated:
        yield "runs of a group have the same algorithm.seed: they are not independent, so the intervals are too narrow"
    if found.mixed:
        yield f"within a group, runs also differ in: {', '.join(found.mixed)}"


def _missing(found: Difference, runs: Sequence[int]) -> str:
    if not found.value:
        return "the groups are equal"
    if found.needed is None:
        return "no number of seeds up to 100 would decide a difference of this size"
    if max(runs) == 1:
        return f"about {found.needed} problems would decide a difference of this size"
    return f"about {found.needed} seeds per group would decide a difference of this size"
