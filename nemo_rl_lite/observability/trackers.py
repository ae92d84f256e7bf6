"""Logs a run's metrics: JSON lines always; W&B, TensorBoard and MLflow if enabled."""

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

from nemo_rl_lite.config.schema import LoggerConfig
from nemo_rl_lite.observability.mlflow import MLflow
from nemo_rl_lite.observability.sink import Chart, Metrics, Sample, Sink
from nemo_rl_lite.observability.wandb import WeightsAndBiases

log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
# The share of a step's tokens that are of one age.
_AGE = re.compile(r"train/age_(\d+)/tokens_share")


class MetricsLog:
    """Sends metrics to all sinks, and keeps them for the summary at the end."""

    def __init__(self, sinks: list[Sink], history: Sequence[dict[str, float]] = ()):
        self._sinks = sinks
        self.history = list(history)

    @classmethod
    def open(
        cls, config: LoggerConfig, run_folder: Path, whole_config: Mapping[str, Any], done: int = 0
    ) -> "MetricsLog":
        """Open the sinks of a run after `done` steps: keep their metrics and move later ones away."""
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


class TensorBoard(Sink):
    def __init__(self, folder: Path, done: int):
        """Hide the folder's steps after `done`, which will be repeated."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        try:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
        # The writer's thread failed, as on a full disk; metrics.jsonl has all metrics.
        except OSError as error:
            log.warning("TensorBoard did not get everything: %s", error)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [(sample.prompt, sample.response, f"{sample.reward:.3g}") for sample in samples]
        self._writer.add_text("rollouts", _as_text(("prompt", "response", "reward"), rows), step)

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        for chart in charts:
            rows = [tuple("" if value is None else str(value) for value in row) for row in chart.rows]
            self._writer.add_text(chart.title, _as_text(chart.columns, rows))

    def close(self) -> None:
        self._writer.close()


def _as_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose cells are escaped, because a model wrote them."""
    cells = [[_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(columns), ["---"] * len(columns), *cells])


def _cell(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")


def rewind(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep and return the entries up to `step` of a file of JSON lines. Move later ones, whose steps will be repeated,
    and incomplete lines to `<name>-undone.jsonl` in the same folder."""
    if not path.exists():
        return []
    kept, undone, entries = [], [], []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        entry = _parsed(line)
        if entry is not None and entry["step"] <= step:
            kept.append(line)
            entries.append(entry)
        else:
            undone.append(line.rstrip("\n") + "\n")
    if undone:
        with path.with_stem(f"{path.stem}-undone").open("a", encoding="utf-8") as file:
            file.writelines(undone)
        remaining = path.with_name(f".{path.name}")
        remaining.write_text("".join(kept), encoding="utf-8")
        remaining.replace(path)
    return entries


def set_aside(files: Iterable[Path], folder: Path) -> None:
    """Move the files of steps that will be repeated to `folder`."""
    for file in files:
        folder.mkdir(exist_ok=True)
        file.replace(folder / file.name)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        return entry if line.endswith("\n") and entry["step"] >= 0 else None
    except (ValueError, KeyError, TypeError):
        return None


def with_every_age[Value: float | None](
    entries: Iterable[Mapping[str, Value]],
) -> tuple[list[dict[str, Value | float]], dict[str, str]]:
    """Fill in a share of 0 for ages that a step with shares of tokens by age does not have. Returns all entries, and
    labels of these metrics, from the youngest age to the oldest."""
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
