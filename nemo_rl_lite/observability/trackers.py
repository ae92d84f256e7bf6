"""Log of a run's metrics, which sends them to all sinks, and the files in the run's folder."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.schema import LoggerConfig
from nemo_rl_lite.observability.sinks import (
    Chart,
    JsonLines,
    Metrics,
    MLflow,
    Sample,
    Sink,
    TensorBoard,
    WeightsAndBiases,
)

log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
# Share of a step's tokens by staleness.
_AGE = re.compile(r"train/age_(\d+)/tokens_share")


class MetricsLog:
    """Sends metrics to all sinks, and keeps them for the summary."""

    def __init__(self, sinks: list[Sink], history: Sequence[dict[str, float]] = ()):
        self._sinks = sinks
        self.history = list(history)

    @classmethod
    def open(
        cls, config: LoggerConfig, run_folder: Path, whole_config: Mapping[str, Any], done: int = 0
    ) -> "MetricsLog":
        """Open the sinks of a run after `done` steps. Metrics of later steps are set aside."""
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
        """Return the steps and values of one metric so far."""
        points = [(entry["step"], entry[name]) for entry in self.history if name in entry]
        return [step for step, _ in points], [value for _, value in points]

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


def rewind(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep and return the entries of a JSON lines file up to `step`. Later entries, whose steps will be repeated, and
    unreadable lines move to `<name>-undone.jsonl` in the same folder."""
    if not path.exists():
        return []
    kept, undone, entries, damaged = [], [], [], []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        is_whole, entry, place = line.endswith(b"\n"), dict[str, Any](), None
        try:
            entry = json.loads(line)
            place = float(entry["step"])
        except (ValueError, KeyError, TypeError):
            # A killed run may leave an incomplete line.
            damaged += [number] if is_whole else []
        if is_whole and place is not None and 0 <= place <= step:
            kept.append(line)
            entries.append(entry)
        else:
            undone.append(line.rstrip(b"\n") + b"\n")
    rest = path.with_stem(f"{path.stem}-undone")
    if damaged:
        count = f"{len(damaged)} lines, beginning with line {damaged[0]}," if len(damaged) > 1 else f"line {damaged[0]}"
        log.warning("%s: %s cannot be read; moved to %s", path, count, rest.name)
    if undone:
        with rest.open("ab") as file:
            file.writelines(undone)
        remaining = path.with_name(f".{path.name}")
        remaining.write_bytes(b"".join(kept))
        remaining.replace(path)
    return entries


def set_aside(files: Iterable[Path], folder: Path) -> None:
    """Move the files of steps that will be repeated to `folder`."""
    for file in files:
        folder.mkdir(exist_ok=True)
        file.replace(folder / file.name)


def with_every_age[Value: float | None](
    entries: Iterable[Mapping[str, Value]],
) -> tuple[list[dict[str, Value | float]], dict[str, str]]:
    """Fill in a share of 0 for each staleness that a step's shares lack. Return all entries, and the labels of these
    metrics in ascending order."""
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
