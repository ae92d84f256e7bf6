"""Writes metrics to a JSON-lines file always, and to W&B, TensorBoard and MLflow where they are enabled."""

import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.sections.run import LoggerConfig
from nemo_rl_lite.observability.history import rewind
from nemo_rl_lite.observability.mlflow import MLflow
from nemo_rl_lite.observability.samples import Sample
from nemo_rl_lite.observability.sink import Chart, Metrics, Sink
from nemo_rl_lite.observability.tensorboard import TensorBoard
from nemo_rl_lite.observability.wandb import WeightsAndBiases

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
# The share of a step's tokens that are of one age.
_AGE = re.compile(r"train/age_(\d+)/tokens_share")


class JsonLines(Sink):
    """Writes one line a call: `{"step": ..., "time": ..., name: value, ...}`. It is in the file when `log` returns;
    where the file system is full, lines wait in memory for the next call."""

    def __init__(self, path: Path):
        self._path, self._waiting = path, ""

    def log(self, step: int, metrics: Metrics) -> None:
        # JSON has no NaN or infinity: they are written as null.
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._waiting += json.dumps({"step": step, "time": time.time(), **numbers}) + "\n"
        self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        size = 0
        try:
            size = self._path.stat().st_size if self._path.exists() else 0
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._waiting)
            self._waiting = ""
        except OSError as error:
            log.warning("metrics cannot be written to %s now: %s", self._path, error)
            # The lines that were partly written are written again.
            with suppress(OSError):
                os.truncate(self._path, size)


class MetricsLog:
    """Sends metrics to all sinks, and keeps them for the summary at the end."""

    def __init__(self, sinks: list[Sink], history: Sequence[dict[str, float]] = ()):
        self._sinks = sinks
        self.history = list(history)

    @classmethod
    def open(
        cls, config: LoggerConfig, run_folder: Path, whole_config: Mapping[str, Any], done: int = 0
    ) -> "MetricsLog":
        """Open the sinks of a run of which `done` steps are done: keep their metrics and move later ones away."""
        history = [
            {name: float(value) for name, value in entry.items() if name != "time" and value is not None}
            for entry in rewind(run_folder / METRICS_FILE, done)
        ]
        sinks: list[Sink] = [JsonLines(run_folder / METRICS_FILE)]
        if config.tensorboard_enabled:
            sinks.append(TensorBoard(run_folder / "tensorboard", done))
        if config.wandb_enabled:
            sinks.append(WeightsAndBiases(config.wandb, run_folder, whole_config))
        if config.mlflow_enabled:
            sinks.append(MLflow(config.mlflow, run_folder, whole_config))
        return cls(sinks, history)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of one step, under their full names."""
        self.history.append({"step": float(step), **metrics})
        for sink in self._sinks:
            sink.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sink in self._sinks:
            sink.log_samples(step, samples)

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        for sink in self._sinks:
            sink.log_summary(values, charts)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """The steps and values of one metric so far."""
        points = [(entry["step"], entry[name]) for entry in self.history if name in entry]
        return [step for step, _ in points], [value for _, value in points]

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


def with_every_age[Value: float | None](
    entries: Iterable[Mapping[str, Value]],
) -> tuple[list[dict[str, Value | float]], dict[str, str]]:
    """Give each step that has shares of tokens by age a share of 0 for the ages that only other steps have. Returns all
    entries, and what to call these metrics, from the youngest age to the oldest."""
    filled = [dict[str, Value | float](entry) for entry in entries]
    found = {match for name in {name for entry in filled for name in entry} if (match := _AGE.fullmatch(name))}
    names = {match[0]: f"age {match[1]}" for match in sorted(found, key=lambda match: int(match[1]))}
    for entry in filled:
        if not names.keys().isdisjoint(entry):
            entry |= {name: 0.0 for name in names if name not in entry}
    return filled, names


def under(prefix: str, metrics: Metrics) -> dict[str, float]:
    """Put `prefix/` before each metric's name."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
