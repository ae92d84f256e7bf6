"""TensorBoard, W&B and MLflow through their real clients, without a network; what they wrote is read back."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_lite.config.schema import MLflowConfig, WandbConfig
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability import sinks
from nemo_rl_lite.observability.sinks import (
    SECTIONS,
    WANDB_ID_FILE,
    Chart,
    MLflow,
    Sample,
    Sink,
    TensorBoard,
    WeightsAndBiases,
)
from nemo_rl_lite.run.folder import write_start
from tests.metric_names import documented

CONFIG = {"algorithm": {"name": "grpo", "seed": 7}, "reward": {"kwargs": {"api_key": "sk-very-secret"}}}
SAMPLES = [Sample("2+2", "<script>5|</script>", 0.0), Sample("1+1", "2", 1.0)]
CHARTS = [
    Chart("phases", "seconds", ("phase", "seconds"), [("generate", 1.0), ("train", 2.0)]),
    Chart("residency", "memory", ("what", "predicted GiB", "measured GiB"), [("train: gradients", None, 0.5)]),
]
WANDB = WandbConfig(project="nemo_rl_lite", name="a-run", entity=None, mode="offline")


def fill(sink: Sink, first: int = 1) -> None:
    for step in (first, first + 1):
        sink.log(step, {"train/reward": step / 4, "ray/node.0.gpu.0.util": 90.0, "train/grad_norm": float("nan")})
    sink.log_samples(first + 1, SAMPLES)


def records(file: Path) -> Iterator[Any]:
    """Of W&B's file, as its own reader has them."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        yield record


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory) -> Path:
    """Of a run that was ended after two steps and went on."""
    import wandb

    folder = tmp_path_factory.mktemp("wandb")
    write_start(folder, CONFIG, "the command")
    sink = WeightsAndBiases(WANDB, folder, CONFIG)
    fill(sink)
    sink.close()
    sink = WeightsAndBiases(WANDB, folder, CONFIG)
    fill(sink, first=3)
    sink.log_summary({"accuracy_after": 0.75, "steps": 4}, CHARTS)
    sink.close()
    # As at the end of a process: what is written is on the disk then.
    wandb.teardown()
    return folder


@pytest.fixture(scope="module")
def wandb_records(wandb_folder) -> list[list[Any]]:
    return [list(records(file)) for file in sorted(wandb_folder.glob("wandb/offline-run-*/*.wandb"))]


def test_wandb_has_every_value_over_the_runs_steps(wandb_records):
    history = []
    for record in (one for part in wandb_records for one in part if one.WhichOneof("record_type") == "history"):
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if "train/reward" in items:
            history.append((items["step"], items["train/reward"], items["ray/node.0.gpu.0.util"]))
    assert history == [(1, 0.25, 90), (2, 0.5, 90), (3, 0.75, 90), (4, 1.0, 90)]


def test_wandb_draws_sections_over_steps_and_keeps_the_best(wandb_records):
    metrics = [one.metric for one in wandb_records[-1] if one.WhichOneof("record_type") == "metric"]
    axes = {one.glob_name: one.step_metric for one in metrics if one.glob_name}
    assert {"train/*", "timing/train/*", "refit/*", "memory/*", "ray/*", "validation/*"} <= axes.keys()
    assert set(axes.values()) == {"step"}
    reward = next(one for one in metrics if one.name == "train/reward")
    assert reward.summary.max and reward.step_metric == "step"


def test_wandb_has_a_section_for_every_metric():
    assert [name for name in documented() if not name.startswith(tuple(f"{section}/" for section in SECTIONS))] == []


def test_wandb_has_samples_charts_and_a_summary(wandb_folder, wandb_records):
    tables = [
        json.loads(file.read_text()) for file in wandb_folder.glob("wandb/offline-run-*/files/media/**/rollouts*")
    ]
    assert [table["data"] for table in tables].count(
        [[4, "2+2", "<script>5|</script>", 0.0], [4, "1+1", "2", 1.0]]
    ) == 1
    charts = {file.name.split("_table")[0] for file in wandb_folder.glob("wandb/offline-run-*/files/media/**/charts/*")}
    assert charts == {"phases", "residency"}
    updates = [item for one in wandb_records[-1] for item in one.summary.update]
    last = {item.key or "/".join(item.nested_key): item.value_json for item in updates}
    assert last["summary/accuracy_after"] == "0.75" and last["summary/steps"] == "4"


def test_wandb_shows_a_run_that_was_ended_as_failed_and_one_that_is_done_as_finished(wandb_records):
    exits = [one.exit.exit_code for part in wandb_records for one in part if one.WhichOneof("record_type") == "exit"]
    assert exits == [1, 0]


def test_wandb_goes_on_with_the_same_run(wandb_folder, wandb_records, capfd):
    kept = (wandb_folder / WANDB_ID_FILE).read_text().strip()
    ids = [one.run.run_id for part in wandb_records for one in part if one.WhichOneof("record_type") == "run"]
    assert ids == [kept, kept]


def test_wandb_gets_no_secret_no_source_and_no_command(wandb_folder):
    files = [file for file in (wandb_folder / "wandb").rglob("*") if file.is_file()]
    written = {file.name: file.read_bytes() for file in files}
    assert not any(b"sk-very-secret" in content for content in written.values())
    assert not [name for name in written if name.endswith(".py")] and "wandb-metadata.json" not in written
    whole = b"".join(content for name, content in written.items() if name.endswith(".wandb"))
    assert b"REDACTED" in whole and b"pytest" not in whole and b"launched_on" in whole


def test_tensorboard_has_values_and_samples_with_nothing_of_them_markup(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, done=0)
    fill(sink)
    sink.log_summary({}, CHARTS)
    sink.close()
    # The tracker resumes after the first step.
    sink = TensorBoard(tmp_path, done=1)
    sink.log(2, {"train/reward": 0.625})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.625)]
    text = events.Tensors("rollouts/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| 2+2 | &lt;script>5&#124;&lt;/script> | 0 |" in text
    assert (
        "| train: gradients |  | 0.5 |" in events.Tensors("memory/text_summary")[0].tensor_proto.string_val[0].decode()
    )


def test_mlflow_has_one_run_that_goes_on(tmp_path):
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    from mlflow import MlflowClient

    store, folder = tmp_path / "mlruns", tmp_path / "run"
    folder.mkdir()
    config = MLflowConfig(tracking_uri=str(store), experiment="an experiment", name="a-run")
    sink = MLflow(config, folder, CONFIG)
    fill(sink)
    sink.close()
    client = MlflowClient(store.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("an experiment").experiment_id])
    assert run.info.status == "FAILED" and run.info.run_name == "a-run"
    assert run.data.params["algorithm.seed"] == "7" and run.data.params["reward.kwargs.api_key"] == "REDACTED"
    sink = MLflow(config, folder, CONFIG | {"algorithm": {"seed": 8}})
    fill(sink, first=3)
    sink.log_summary({"accuracy_after": 0.75}, CHARTS)
    sink.close()
    (run,) = client.search_runs(run.info.experiment_id)
    assert run.info.status == "FINISHED" and run.data.metrics["summary/accuracy_after"] == 0.75
    rewards = client.get_metric_history(run.info.run_id, "train/reward")
    assert sorted((one.step, one.value) for one in rewards) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert "train/grad_norm" not in run.data.metrics and run.data.metrics["ray/node.0.gpu.0.util"] == 90
    written = [file.read_text() for file in store.rglob("step-*.txt")]
    assert len(written) == 2 and "<script>5|</script>" in written[0]


def test_mlflow_that_cannot_start_names_the_key(tmp_path):
    pytest.importorskip("mlflow", reason="needs the extra mlflow")

    config = MLflowConfig(tracking_uri="gopher://nowhere", experiment="x", name=None)
    with pytest.raises(LauncherError, match=r"logger.mlflow.tracking_uri"):
        MLflow(config, tmp_path, CONFIG)


@pytest.fixture
def mlflow_sink(tmp_path) -> Any:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    return MLflow(MLflowConfig(tracking_uri=str(tmp_path / "mlruns"), experiment="x", name=None), tmp_path, CONFIG)


def test_neither_training_nor_the_end_of_a_run_waits_for_an_mlflow_that_hangs(mlflow_sink, monkeypatch, caplog):
    monkeypatch.setattr(sinks, "END_WAIT_S", 0.5)
    answers, calls, threads = threading.Event(), [], set(threading.enumerate())
    monkeypatch.setattr(mlflow_sink._client, "log_batch", lambda *_, **__: (calls.append("metrics"), answers.wait(60)))
    monkeypatch.setattr(mlflow_sink._client, "set_terminated", lambda *_: calls.append("status"))
    began = time.monotonic()
    fill(mlflow_sink)
    mlflow_sink.close()
    assert time.monotonic() - began < 45
    # Two batches, samples, the status.
    assert "MLflow did not get 4 of 4 messages; the run's end waited 0.5 s for it" in caplog.text
    # The run may have gone on by the time that it answers: nothing more is sent then.
    answers.set()
    mlflow_sink._calls._thread.join(10)
    assert calls == ["metrics"] and set(threading.enumerate()) <= threads


def test_an_mlflow_that_comes_back_gets_what_is_later_and_its_absence_is_one_warning(mlflow_sink, monkeypatch, caplog):
    from mlflow import MlflowClient

    log_batch, absences = mlflow_sink._client.log_batch, iter(range(3))

    def absent_at_first(*arguments, **named):
        if (absence := next(absences, None)) is not None:
            logging.getLogger("urllib3.connectionpool").warning("Retrying after connection broken: refused")
            raise ConnectionError(f"<HTTPConnection object at {0x7F00 + absence:#x}>: refused")
        log_batch(*arguments, **named)

    monkeypatch.setattr(mlflow_sink._client, "log_batch", absent_at_first)
    for step in range(5):
        mlflow_sink.log(step, {"train/reward": float(step)})
    mlflow_sink.log_summary({"steps": 5.0}, [])
    mlflow_sink.close()
    run = MlflowClient(mlflow_sink._client.tracking_uri).get_run(mlflow_sink._run_id)
    assert run.info.status == "FINISHED" and run.data.metrics["train/reward"] == 4
    assert caplog.text.count("refused") == 1 and "MLflow did not get 3 of 7 messages\n" in caplog.text


def test_the_end_of_a_process_does_not_wait_for_an_mlflow_that_hangs(tmp_path):
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    script = (
        "import threading\n"
        "from pathlib import Path\n"
        "from nemo_rl_lite.config.schema import MLflowConfig\n"
        "from nemo_rl_lite.observability import sinks\n"
        "sinks.END_WAIT_S = 0.5\n"
        "config = MLflowConfig(tracking_uri='mlruns', experiment='x', name=None)\n"
        "sink = sinks.MLflow(config, Path(), {})\n"
        "sink._client._tracking_client.store.log_batch = lambda *_, **__: threading.Event().wait()\n"
        "sink.log(1, {'train/reward': 1.0})\n"
        "sink.close()\n"
    )
    # This also holds if MLflow is configured to send from its own threads, which it waits for at exit.
    environment = os.environ | {"MLFLOW_ENABLE_ASYNC_LOGGING": "true"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "MLflow did not get 2 of 2 messages" in done.stderr
