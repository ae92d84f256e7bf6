"""Sends metrics, parameters and samples to MLflow: a server, a database or a folder."""

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

from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.config.schema import MLflowConfig
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability.environment import for_trackers
from nemo_rl_lite.observability.sink import Chart, Metrics, Sample, Sink

log = logging.getLogger(__name__)
RUN_ID_FILE = "mlflow-run-id.txt"
# MLflow's limits: metrics and parameters in one request, characters of a parameter's value.
_METRICS, _PARAMETERS, _CHARACTERS = 1000, 100, 500
# With MLflow's own limits, a server that cannot be reached would delay the start by minutes.
_SETTINGS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
END_WAIT_S = 60.0
"""Seconds that the end of a run waits for calls that are still to be sent."""


class MLflow(Sink):
    """One MLflow run, which a resumed run continues. A failed call is a warning, and training never waits."""

    def __init__(self, config: MLflowConfig, folder: Path, whole_config: Mapping[str, Any]):
        is_path = ":" not in config.tracking_uri and config.tracking_uri != "databricks"
        address = Path(config.tracking_uri).expanduser().resolve().as_uri() if is_path else config.tracking_uri
        if address.startswith("file:"):
            # MLflow recommends databases and refuses a folder without this.
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
            fix = "check logger.mlflow.tracking_uri, or set logger.mlflow_enabled=false"
            raise LauncherError(f"MLflow could not start: {error}. {fix}") from error
        self._calls = _Calls()

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # A database cannot store NaN or infinity.
        finite = [Metric(name, float(value), now, step) for name, value in metrics.items() if math.isfinite(value)]
        for part in batched(finite, _METRICS):
            # `synchronous`: at exit, Python would wait without a limit for MLflow's own threads.
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
        """The id of the MLflow run that this run continues; None where MLflow does not have it."""
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
        (folder / RUN_ID_FILE).write_text(f"{run_id}\n")
        return run_id


class _Calls:
    """Calls to the client, one at a time and in order, in a daemon thread that does not delay the process' end. (Stores
    in a folder break when two batches arrive at the same time.)"""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._added, self._made, self._given_up = 0, 0, False
        self._warned: set[str] = set()
        # The connection warns of each retry; `_make_all` warns once.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._thread = Thread(target=self._make_all, name="mlflow", daemon=True)
        self._thread.start()

    def add(self, call: Callable[[], object]) -> None:
        self._added += 1
        self._waiting.put(call)

    def close(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for the calls, drop the rest, and log how many those are."""
        self._waiting.put(None)
        self._thread.join(wait_s)
        # A late call must not change the run after it was resumed in this process.
        self._given_up = True
        if missing := self._added - self._made:
            late = f"; the run's end waited {wait_s:g} s for it" if self._thread.is_alive() else ""
            log.warning("MLflow did not get %d of %d messages%s", missing, self._added, late)

    def _make_all(self) -> None:
        while (call := self._waiting.get()) is not None and not self._given_up:
            try:
                call()
                self._made += 1
            except Exception as error:  # of any library that the store uses; the next call may succeed
                # The same failure names another object's address each time.
                text = re.sub(r"\b0x[0-9a-f]+", "0x...", f"{type(error).__name__}: {error}")
                if text not in self._warned:
                    self._warned.add(text)
                    log.warning("MLflow did not get everything: %s", text)
