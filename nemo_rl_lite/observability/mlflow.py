"""Metrics, parameters and samples for MLflow: a server, a database or a folder."""

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from itertools import batched
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.leaves import leaves
from nemo_rl_lite.config.schema import MLflowConfig
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability.run_folder import for_others
from nemo_rl_lite.observability.samples import Sample
from nemo_rl_lite.observability.sinks import Chart, Metrics, Sink

log = logging.getLogger(__name__)

RUN_ID_FILE = "mlflow-run-id.txt"
# What MLflow takes at once, and of one parameter's value.
_PARAMETERS, _CHARACTERS = 100, 500
# A server that is gone would hold the run up for minutes a call; and two batches at once break a folder as the store:
# each makes the folder of a new metric, and the one that comes second is lost.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE": "1",
}


class MLflow(Sink):
    """One MLflow run, the same where it goes on. A thread sends metrics; one that does not arrive is a warning."""

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

        self._status, self._sent = "FAILED", []
        try:
            self._client = MlflowClient(address)
            self._run_id = self._resumed(folder / RUN_ID_FILE) or self._create(config, folder, whole_config)
        except MlflowException as error:
            fix = "logger.mlflow.tracking_uri is where it is looked for; logger.mlflow_enabled=false goes without"
            raise LauncherError(f"MLflow could not start: {error}. {fix}") from error

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # A database has no place for what is not a number.
        finite = [Metric(name, float(value), now, step) for name, value in metrics.items() if math.isfinite(value)]
        for part in batched(finite, 1000):
            self._guarded(lambda part=part: self._send(part))

    def _send(self, metrics: Sequence[Any]) -> None:
        self._sent.append(self._client.log_batch(self._run_id, metrics=metrics, synchronous=False))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        text = "\n\n".join(f"reward {one.reward:g}\n{one.prompt}\n---\n{one.response}" for one in samples)
        self._guarded(lambda: self._client.log_text(self._run_id, text, f"rollouts/step-{step:08d}.txt"))

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(f"summary/{name}", float(value), now, 0) for name, value in values.items()]
        self._guarded(lambda: self._client.log_batch(self._run_id, metrics=metrics))
        self._status = "FINISHED"

    def close(self) -> None:
        for operation in self._sent:
            if not self._guarded(operation.wait):
                # The others would be waited for as long.
                break
        self._guarded(lambda: self._client.set_terminated(self._run_id, self._status))

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
        parameters = [Param(key, str(value)[:_CHARACTERS]) for key, value in leaves(for_others(folder, whole_config))]
        for part in batched(parameters, _PARAMETERS):
            self._client.log_batch(run_id, params=part)
        (folder / RUN_ID_FILE).write_text(f"{run_id}\n")
        return run_id

    @staticmethod
    def _guarded(call: Any) -> bool:
        """Whether it went well."""
        try:
            call()
            return True
        # A store may raise errors of any library that it is reached through, and training does not hang on it.
        except Exception as error:
            log.warning("MLflow did not get everything: %s: %s", type(error).__name__, error)
            return False


def _address(uri: str) -> tuple[str, bool]:
    """As MLflow wants it, and whether it is a folder."""
    is_folder = uri.startswith("file:") or (":" not in uri and uri != "databricks")
    return (Path(uri).resolve().as_uri() if is_folder and ":" not in uri else uri), is_folder
