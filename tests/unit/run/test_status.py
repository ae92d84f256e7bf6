"""What a run writes down of itself."""

import json
import os
import signal
import subprocess
import sys

import pytest

from nemo_rl_lite.errors import RefitError, RunStopped
from nemo_rl_lite.observability.environment import ENVIRONMENT_FILE, ERROR_FILE, STATUS_FILE
from nemo_rl_lite.run.folder import status_kept, write_start
from nemo_rl_lite.system import stopping


def status(folder) -> dict:
    return json.loads((folder / STATUS_FILE).read_text())


def test_a_run_that_is_done(tmp_path):
    with status_kept(tmp_path, saves=True):
        assert (status(tmp_path)["state"], status(tmp_path)["ended"]) == ("running", None)
        assert status(tmp_path)["pid"] == os.getpid()
    assert (status(tmp_path)["state"], status(tmp_path)["exit_status"]) == ("done", 0)
    assert status(tmp_path)["ended"] >= status(tmp_path)["started"]


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (RefitError("bucket 3"), "failed", 4),
        (RunStopped(3, 9, "SIGTERM was received", "here"), "stopped", 75),
        (KeyboardInterrupt(), "interrupted", 130),
        (ValueError("a defect"), "failed", 1),
    ],
)
def test_a_run_that_ends_otherwise_says_how(tmp_path, error, state, code):
    with pytest.raises(type(error)), status_kept(tmp_path, saves=True):
        raise error
    assert (status(tmp_path)["state"], status(tmp_path)["exit_status"]) == (state, code)


@pytest.mark.parametrize(("saves", "code"), [(True, 75), (False, 130)])
def test_a_run_that_a_signal_ended_at_once_can_be_resumed_where_it_saves(tmp_path, monkeypatch, saves, code):
    monkeypatch.setattr(stopping, "_received", [signal.SIGTERM])
    with pytest.raises(KeyboardInterrupt), status_kept(tmp_path, saves):
        raise KeyboardInterrupt
    assert (status(tmp_path)["state"], status(tmp_path)["exit_status"]) == ("interrupted", code)


def test_one_that_is_killed_is_still_running_there(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from nemo_rl_lite.run.folder import status_kept\n"
        "with status_kept(Path(sys.argv[1]), True): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL and status(tmp_path)["state"] == "running"


def test_the_environment_is_told_without_environment_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-value")
    (tmp_path / ERROR_FILE).write_text("of an earlier start")
    write_start(tmp_path, {"run_name": "x"}, "the command")
    text = (tmp_path / ENVIRONMENT_FILE).read_text()
    environment = json.loads(text)
    assert environment["versions"]["torch"] and environment["hardware"]["cores"] >= 1 and environment["host"]
    assert "very-secret-value" not in text and not (tmp_path / ERROR_FILE).exists()
