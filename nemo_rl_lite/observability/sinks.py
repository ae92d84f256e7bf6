"""Where metrics go: a JSON-lines file always, TensorBoard and W&B where the configuration asks for them."""

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.config.schema import LoggerConfig
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability.history import rewind

log = logging.getLogger(__name__)

METRICS_FILE, WANDB_ID_FILE = "metrics.jsonl", "wandb-run-id.txt"
# What metrics' names begin with.
PREFIXES = (
    "train",
    "timing/train",
    "timing/validation",
    "timing/setup",
    "performance",
    "refit",
    "offload",
    "memory",
    "validation",
)
Metrics = Mapping[str, float]


class Sink(Protocol):
    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One line a call: `{"step": ..., "time": ..., name: value, ...}`, with the file system when `log` returns. Where
    that is full, lines wait for the next call."""

    def __init__(self, path: Path):
        self._path, self._waiting = path, ""

    def log(self, step: int, metrics: Metrics) -> None:
        # JSON has no NaN: what is not a number is null.
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._waiting += json.dumps({"step": step, "time": time.time(), **numbers}) + "\n"
        self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._waiting)
            self._waiting = ""
        except OSError as error:
            log.warning("metrics cannot be written to %s now: %s", self._path, error)
            # What got there of them comes again, whole.
            os.truncate(self._path, size)


class TensorBoard:
    def __init__(self, folder: Path, done: int):
        """Steps after `done` that are there already are taken again, and no longer shown."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run. Source code is not uploaded."""

    def __init__(self, config: LoggerConfig, folder: Path, whole_config: Mapping[str, Any]):
        import wandb

        try:
            self._run = self._start(config, folder, whole_config)
        except wandb.errors.Error as error:
            raise LauncherError(f"W&B could not start: {error}. Offline works: logger.wandb.mode=offline") from error
        for prefix in PREFIXES:
            self._run.define_metric(f"{prefix}/*", step_metric="step")

    @staticmethod
    def _start(config: LoggerConfig, folder: Path, whole_config: Mapping[str, Any]) -> Any:
        import wandb

        settings, kept = config.wandb, folder / WANDB_ID_FILE
        if not kept.exists():
            kept.write_text(secrets.token_hex(4) + "\n")
        return wandb.init(
            # A run that goes on is the same run there.
            id=kept.read_text().strip(),
            resume="allow",
            project=settings.project,
            name=settings.name,
            entity=settings.entity,
            mode=settings.mode,
            dir=folder,
            config=dict(whole_config),
            save_code=False,
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class MetricsLog:
    """All sinks behind one call; remembers everything, for the report at the end."""

    def __init__(self, sinks: list[Sink], history: Sequence[dict[str, float]] = ()):
        self._sinks = sinks
        self.history = list(history)

    @classmethod
    def open(
        cls, config: LoggerConfig, run_folder: Path, whole_config: Mapping[str, Any], done: int = 0
    ) -> "MetricsLog":
        """Go on after `done` steps with what the folder has of them; what it has of later ones is put aside."""
        history = [
            {name: float(value) for name, value in entry.items() if name != "time" and value is not None}
            for entry in rewind(run_folder / METRICS_FILE, done)
        ]
        sinks: list[Sink] = [JsonLines(run_folder / METRICS_FILE)]
        if config.tensorboard_enabled:
            sinks.append(TensorBoard(run_folder / "tensorboard", done))
        if config.wandb_enabled:
            sinks.append(WeightsAndBiases(config, run_folder, whole_config))
        return cls(sinks, history)

    def log(self, step: int, metrics: Metrics) -> None:
        """Metrics of one step, under their full names."""
        self.history.append({"step": float(step), **metrics})
        for sink in self._sinks:
            sink.log(step, metrics)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric so far."""
        points = [(entry["step"], entry[name]) for entry in self.history if name in entry]
        return [step for step, _ in points], [value for _, value in points]

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


def under(prefix: str, metrics: Metrics) -> dict[str, float]:
    """The metrics with `prefix/` before each name."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
