"""Read the metrics of a run that gpu_run.py kept."""

import statistics
from typing import Any

import record

Run = dict[str, Any]


def values(run: Run, metric: str) -> list[float]:
    return [value for _, value in run["series"][metric]]


def typical(runs: list[Run], metric: str) -> list[float]:
    return [statistics.median(values(run, metric)) for run in runs]


def worst(runs: list[Run], metric: str) -> float:
    return max(max(values(run, metric)) for run in runs)


def mismatch_bars(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the limits on the mismatch of policy and engine."""
    difference, factor = worst(runs, "train/logprob_abs_diff_mean"), worst(runs, "train/token_mult_prob_error")
    return [
        record.bar("largest mean absolute logprob difference of a step", difference, 0.05, at_least=False),
        record.bar("largest token_mult_prob_error of a step", factor, 1.05, at_least=False),
    ]
