"""Metrics, parameters and samples for MLflow: a server, a database or a folder."""

import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import batched
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from nemo_rl_lite.config.leaves import leaves
from nemo_rl_lite.config.schema import MLflowConfig
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability.environment import for_trackers
from nemo_rl_lite.observability.samples import Sample
from nemo_rl_lite.observability.sink import Chart, Metrics, Sink

log = logging.getLogger(__name__)

RUN_ID_FILE = "mlflow-run-id.txt"
# What MLflow takes at once, and of one parameter's value.
_PARAMETERS, _CHARACTERS = 100, 500
# A server that cannot be reached would hold the start up for minutes.
_SETTINGS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
# How long the end of a run waits for what is still to be sent, in seconds.
END_WAIT_S = 60.0
_THREAD = "mlflow"


class MLflow(Sink):
    """One MLflow run, the same where it goes on. What does not arrive is a warning, and training never waits."""

    def __init__(self, config: MLflowConfig, folder: Path, whole_config: Mapping[str, Any]):
        address, is_folder = _address(config.tracking_uri)
        if is_folder:
            # MLflow wants to be told so since it recommends databases.
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._status = "FAILED"
        try:
            self._client = MlflowClient(address)
            self._run_id = self._resumed(folder / RUN_ID_FILE) or self._create(config, folder, whole_config)
        except MlflowException as error:
            fix = "logger.mlflow.tracking_uri is where it is looked for; logger.mlflow_enabled=false goes without"
            raise LauncherError(f"MLflow could not start: {error}. {fix}") from error
        self._messages = _Messages()

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # A database has no place for what is not a number.
        finite = [Metric(name, float(value), now, step) for name, value in metrics.items() if math.isfinite(value)]
        for part in batched(finite, 1000):
            self._send_metrics(part)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        text = "\n\n".join(f"reward {one.reward:g}\n{one.prompt}\n---\n{one.response}" for one in samples)
        self._messages.send(lambda: self._client.log_text(self._run_id, text, f"rollouts/step-{step:08d}.txt"))

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(f"summary/{name}", float(value), now, 0) for name, value in values.items()]
        self._send_metrics(metrics)
        self._status = "FINISHED"

    def close(self) -> None:
        self._messages.send(lambda: self._client.set_terminated(self._run_id, self._status))
        self._messages.close(END_WAIT_S)

    def _send_metrics(self, metrics: Sequence[Any]) -> None:
        # MLflow's own threads, which MLFLOW_ENABLE_ASYNC_LOGGING would start, are waited for without a limit at exit.
        self._messages.send(lambda: self._client.log_batch(self._run_id, metrics=metrics, synchronous=True))

    def _resumed(self, kept: Path) -> str | None:
        """The run that this one goes on with, where it is still there."""
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
        parameters = [Param(key, str(value)[:_CHARACTERS]) for key, value in leaves(for_trackers(folder, whole_config))]
        for part in batched(parameters, _PARAMETERS):
            self._client.log_batch(run_id, params=part, synchronous=True)
        (folder / RUN_ID_FILE).write_text(f"{run_id}\n")
        return run_id


class _Messages:
    """Calls to the client, one at a time and in order: a folder as the store breaks where two batches come at once.

    They are made in a thread that the end of the process does not wait for. What waits is kept in memory.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._sent, self._arrived, self._given_up = 0, 0, False
        self._warned: set[str] = set()
        self._thread = Thread(target=self._work, name=_THREAD, daemon=True)
        logging.getLogger("urllib3.connectionpool").addFilter(_is_not_of_the_thread)
        self._thread.start()

    def send(self, call: Callable[[], object]) -> None:
        self._sent += 1
        self._waiting.put(call)

    def close(self, wait_s: float) -> None:
        """Wait so long for what is under way, give the rest up, and say how much that is."""
        self._waiting.put(None)
        self._thread.join(wait_s)
        # The run may go on in this process: what is late must not end it there.
        self._given_up = True
        if missing := self._sent - self._arrived:
            late = f"; the run's end waited {wait_s:g} s for it" if self._thread.is_alive() else ""
            log.warning("MLflow did not get %d of %d messages%s", missing, self._sent, late)

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None and not self._given_up:
            try:
                call()
                self._arrived += 1
            # A store may raise errors of any library that it is reached through; the next call may find it back.
            except Exception as error:
                self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, failure: str) -> None:
        # The same failure has another object's address each time.
        text = re.sub(r"\b0x[0-9a-f]+", "0x...", failure)
        if text not in self._warned:
            self._warned.add(text)
            log.warning("MLflow did not get everything: %s", text)


def _is_not_of_the_thread(record: logging.LogRecord) -> bool:
    """Leaves out what the connection says of each new try while a server is away: the thread says it once."""
    return record.threadName != _THREAD


def _address(uri: str) -> tuple[str, bool]:
    """As MLflow wants it, and whether it is a folder."""
    is_folder = uri.startswith("file:") or (":" not in uri and uri != "databricks")
    return (Path(uri).resolve().as_uri() if is_folder and ":" not in uri else uri), is_folder
