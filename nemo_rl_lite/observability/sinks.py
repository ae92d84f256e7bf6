"""Sinks of a run's metrics: JSON lines, TensorBoard, W&B and MLflow. Trackers are imported on demand."""

import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.config.schema import MLflowConfig, WandbConfig
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability.environment import for_trackers

log = logging.getLogger(__name__)
Metrics = Mapping[str, float]
# Files in the run's folder with the trackers' run ids.
WANDB_ID_FILE, MLFLOW_ID_FILE = "wandb-run-id.txt", "mlflow-run-id.txt"
# Prefixes of metrics; each is a section of the dashboard.
SECTIONS = (
    "train",
    "rollout",
    "timing/train",
    "timing/validation",
    "timing/setup",
    "timing/rollout",
    "timing/replicas",
    "performance",
    "refit",
    "offload",
    "memory",
    "validation",
    "ray",
)
# Aggregates in W&B's table of runs.
BEST = {"validation/accuracy": "max", "validation/val_loss": "min", "train/reward": "max", "train/loss": "min"}
# MLflow's limits: metrics and parameters per request, characters per parameter.
_METRICS, _PARAMETERS, _CHARACTERS = 1000, 100, 500
# With MLflow's defaults, an unreachable server would delay the start by minutes.
_SETTINGS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
END_WAIT_S = 60.0
"""Seconds that the end of a run waits for pending calls."""


@dataclass(frozen=True)
class Sample:
    """A sample of a rollout as text."""

    prompt: str
    response: str
    reward: float


def spread(rewards: Sequence[float], count: int) -> list[int]:
    """Return at most `count` indices, evenly spaced from the lowest reward to the highest."""
    order = sorted(range(len(rewards)), key=lambda index: rewards[index])
    if len(order) <= count:
        return order
    return [order[round(index * (len(order) - 1) / max(count - 1, 1))] for index in range(count)]


def text_of(messages: Sequence[dict[str, Any]]) -> str:
    """Return the content of the messages, with their roles if there are several."""
    if len(messages) == 1:
        return messages[0]["content"] or ""
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in messages)


@dataclass(frozen=True)
class Chart:
    """A bar chart: each row has a label first and its value last."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str | float | None, ...]]


class Sink:
    """Receiver of a run's metrics. The base class ignores them."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of one step."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples of the step's rollout, ordered from the lowest reward to the highest."""

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        """Log the summary of a finished run."""

    def close(self) -> None:
        """Write pending metrics."""


class JsonLines(Sink):
    """A file with one line per call: `{"step": ..., "time": ..., name: value, ...}`. While the disk is full, lines
    wait in memory for the next call."""

    def __init__(self, path: Path):
        self._path, self._waiting = path, ""

    def log(self, step: int, metrics: Metrics) -> None:
        # JSON has no NaN or infinity.
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
            # Remove partly written lines.
            with suppress(OSError):
                os.truncate(self._path, size)


class TensorBoard(Sink):
    """TensorBoard event files in a folder."""

    def __init__(self, folder: Path, done: int):
        """Steps after `done`, which will be repeated, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        try:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
        # The writer's thread failed, for example because the disk is full; metrics.jsonl has all metrics.
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
    """Return a Markdown table with escaped cells."""
    escapes = str.maketrans({"&": "&amp;", "<": "&lt;", "|": "&#124;", "\n": "<br>"})
    cells = [[value.translate(escapes) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(columns), ["---"] * len(columns), *cells])


class WeightsAndBiases(Sink):
    """A W&B run. Source code, command line and secrets are not uploaded. `wandb sync RUN/wandb/offline-run-*` uploads
    an offline run."""

    def __init__(self, config: WandbConfig, folder: Path, whole_config: Mapping[str, Any]):
        import wandb

        self._is_done = False
        kept = folder / WANDB_ID_FILE
        if not kept.exists():
            kept.write_text(secrets.token_hex(4) + "\n")
        try:
            self._run = wandb.init(
                # A resumed run continues the same W&B run.
                id=kept.read_text().strip(),
                resume="allow" if config.mode == "online" else None,
                project=config.project,
                name=config.name,
                entity=config.entity,
                mode=config.mode,
                dir=folder,
                config=for_trackers(folder, whole_config),
                save_code=False,
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, disable_job_creation=True, x_disable_meta=True
                ),
            )
        except wandb.errors.Error as error:
            raise LauncherError(f"W&B could not start: {error}. Offline works: logger.wandb.mode=offline") from error
        self._run.define_metric("step", hidden=True)
        for section in SECTIONS:
            self._run.define_metric(f"{section}/*", step_metric="step")
        for name, best in BEST.items():
            self._run.define_metric(name, step_metric="step", summary=f"{best},last")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        import wandb

        rows: Any = [[step, sample.prompt, sample.response, sample.reward] for sample in samples]
        table = wandb.Table(columns=["step", "prompt", "response", "reward"], data=rows)
        self._run.log({"step": step, "rollouts": table})

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        import wandb

        for chart in charts:
            table = wandb.Table(columns=list(chart.columns), data=[list(row) for row in chart.rows])
            drawn = wandb.plot.bar(table, chart.columns[0], chart.columns[-1], title=chart.title)
            self._run.log({f"charts/{chart.name}": drawn})
        self._run.summary.update({f"summary/{name}": value for name, value in values.items()})
        self._is_done = True

    def close(self) -> None:
        import wandb

        # Without an exit code W&B shows a failed or stopped run as finished.
        self._run.finish(exit_code=0 if self._is_done else 1)
        if wandb.run is None:
            # End W&B's service process and threads.
            wandb.teardown()


class MLflow(Sink):
    """An MLflow run on a server, in a database or in a folder. A resumed run continues it. Failed calls are warnings,
    and training never waits."""

    def __init__(self, config: MLflowConfig, folder: Path, whole_config: Mapping[str, Any]):
        is_path = ":" not in config.tracking_uri and config.tracking_uri != "databricks"
        address = Path(config.tracking_uri).expanduser().resolve().as_uri() if is_path else config.tracking_uri
        if address.startswith("file:"):
            # MLflow refuses a folder without this variable.
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._status = "FAILED"
        try:
            self._client = MlflowClient(address)
            self._run_id = self._resumed(folder / MLFLOW_ID_FILE) or self._create(config, folder, whole_config)
        except MlflowException as error:
            fix = "check logger.mlflow.tracking_uri, or set logger.mlflow_enabled=false"
            raise LauncherError(f"MLflow could not start: {error}. {fix}") from error
        self._calls = _Calls()

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # A database cannot store NaN or infinity.
        finite = [Metric(name, float(value), now, step) for name, value in metrics.items() if math.isfinite(value)]
        for part in batched(finite, _METRICS):
            # Asynchronous calls would use MLflow's threads, for which Python waits without a limit at exit.
            self._calls.add(lambda part=part: self._client.log_batch(self._run_id, metrics=part, synchronous=True))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        text = "\n\n".join(f"reward {one.reward:g}\n{one.prompt}\n---\n{one.response}" for one in samples)
        self._calls.add(lambda: self._client.log_text(self._run_id, text, f"rollouts/step-{step:08d}.txt"))

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        self.log(0, {f"summary/{name}": value for name, value in values.items()})
        self._status = "FINISHED"

    def close(self) -> None:
        self._calls.add(lambda: self._client.set_terminated(self._run_id, self._status))
        self._calls.close(END_WAIT_S)

    def _resumed(self, kept: Path) -> str | None:
        """Return the id of the MLflow run to continue; None if there is none."""
        from mlflow.exceptions import MlflowException

        try:
            run_id = kept.read_text().strip()
            self._client.update_run(run_id, status="RUNNING")
        except (FileNotFoundError, MlflowException):
            return None
        return run_id

    def _create(self, config: MLflowConfig, folder: Path, whole_config: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name(config.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(config.experiment)
        run_id = self._client.create_run(experiment, run_name=config.name, tags={"run_folder": str(folder)}).info.run_id
        parameters = [
            Param(key, str(value)[:_CHARACTERS]) for key, value in flatten(for_trackers(folder, whole_config))
        ]
        for part in batched(parameters, _PARAMETERS):
            self._client.log_batch(run_id, params=part, synchronous=True)
        (folder / MLFLOW_ID_FILE).write_text(f"{run_id}\n")
        return run_id


class _Calls:
    """Calls of the client, sequential in a daemon thread, which does not delay the end of the process. Stores in a
    folder do not support concurrent batches."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._added, self._made, self._given_up = 0, 0, False
        self._warned: set[str] = set()
        # urllib3 warns of each retry; `_make_all` warns once.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._thread = Thread(target=self._make_all, name="mlflow", daemon=True)
        self._thread.start()

    def add(self, call: Callable[[], object]) -> None:
        self._added += 1
        self._waiting.put(call)

    def close(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for the calls. Drop the rest, and log their number."""
        self._waiting.put(None)
        self._thread.join(wait_s)
        # A late call must not change the run after it has resumed in this process.
        self._given_up = True
        if missing := self._added - self._made:
            late = f"; the run's end waited {wait_s:g} s for it" if self._thread.is_alive() else ""
            log.warning("MLflow did not get %d of %d messages%s", missing, self._added, late)

    def _make_all(self) -> None:
        while (call := self._waiting.get()) is not None and not self._given_up:
            try:
                call()
                self._made += 1
            except Exception as error:  # of any library of the store; the next call may succeed
                # Addresses of objects differ between equal errors.
                text = re.sub(r"\b0x[0-9a-f]+", "0x...", f"{type(error).__name__}: {error}")
                if text not in self._warned:
                    self._warned.add(text)
                    log.warning("MLflow did not get everything: %s", text)
