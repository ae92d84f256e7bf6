"""Metrics of a run that gpu_run.py kept."""

import statistics
from typing import Any

Run = dict[str, Any]


def values(run: Run, metric: str) -> list[float]:
    return [value for _, value in run["series"][metric]]


def typical(runs: list[Run], metric: str) -> list[float]:
    return [statistics.median(values(run, metric)) for run in runs]


def worst(runs: list[Run], metric: str) -> float:
    return max(max(values(run, metric)) for run in runs)
