"""Which runs a folder can go on with, and that there is one at a time."""

import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from nemo_rl_lite.checkpoint.resume import checkpoint_store
from nemo_rl_lite.checkpoint.store import RECORD
from nemo_rl_lite.errors import ConfigError, WorkerError
from nemo_rl_lite.observability.callbacks import Callbacks
from nemo_rl_lite.observability.environment import COMMAND_FILE, CONFIG_FILE, ERROR_FILE, described
from nemo_rl_lite.observability.summary import SUMMARY_FILE
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.run.folder import (
    check_folder,
    how_to_resume,
    kept_unless_begun,
    locked,
    status_kept,
    write_error,
    write_start,
)
from nemo_rl_lite.run.run import run
from nemo_rl_lite.validation.compose import compose_config

# Takes the lock, starts a program that would inherit every file it may, names it and waits.
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from nemo_rl_lite.run.folder import locked
with locked(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "600"], close_fds=False, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    time.sleep(600)
"""


def enter(folder, *overrides):
    whole_config = dataclasses.asdict(compose_config(overrides))
    check_folder(folder, whole_config)
    write_start(folder, whole_config, "the command")


@pytest.fixture
def folder(tmp_path):
    """Of a run that was killed before it saved anything."""
    enter(tmp_path)
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    return tmp_path


def save(folder):
    store = checkpoint_store(compose_config(), folder)
    store.begin(10)
    store.finish(10, {}, {})


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_refused_resume_leaves_the_folder_as_it_was(folder, has_begun):
    (folder / SUMMARY_FILE).write_text('{"steps": 4}')
    (folder / SUMMARY_FILE).chmod(0o604)
    with status_kept(folder, saves=True):
        pass
    before = {file.name: (file.read_bytes(), file.stat().st_mode) for file in folder.iterdir()}
    with pytest.raises(ConfigError), kept_unless_begun(folder, lambda: has_begun):
        write_start(folder, {"algorithm": "another"}, "another command")
        with status_kept(folder, saves=True):
            raise ConfigError([])
    after = {file.name: (file.read_bytes(), file.stat().st_mode) for file in folder.iterdir()}
    assert (after == before) is not has_begun and (folder / SUMMARY_FILE).exists() is not has_begun


def test_a_first_start_that_fails_keeps_what_it_wrote(tmp_path):
    with pytest.raises(ConfigError), kept_unless_begun(tmp_path, lambda: False):
        write_start(tmp_path, {}, "the command")
        raise ConfigError([])
    assert (tmp_path / COMMAND_FILE).exists()


def test_the_same_command_starts_again_where_nothing_was_saved(folder):
    enter(folder, "logger.log_samples=9")
    assert (folder / COMMAND_FILE).read_text() == "the command\n" * 2


def test_an_interrupted_run_is_said_to_resume_only_where_it_has_saved(folder):
    assert "cannot be resumed" in how_to_resume(folder)
    save(folder)
    where = "from the checkpoint of step 10"
    assert how_to_resume(folder) == f"to resume {where}, give the same command with hydra.run.dir={folder}"


def test_another_one_does_not(folder):
    before = (folder / CONFIG_FILE).read_text()
    with pytest.raises(ConfigError, match="holds a run already, without a checkpoint"):
        enter(folder, "algorithm.seed=7")
    assert (folder / CONFIG_FILE).read_text() == before


def test_a_run_with_a_checkpoint_may_go_on_with_other_settings(folder):
    save(folder)
    enter(folder, "policy.megatron_cfg.optimizer.lr=1e-5")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], ""),
        (["logger.log_samples=9"], ""),
        (["algorithm.max_num_steps=99", "algorithm.seed=7"], "; the command changes algorithm.seed"),
        (["algorithm=sft"], r"; the command changes .*, \.\.\."),
    ],
)
def test_a_run_that_is_done_stays_as_it_is(folder, overrides, told):
    save(folder)
    (folder / SUMMARY_FILE).write_text("{}")
    lengths = "algorithm.max_num_epochs or algorithm.max_num_steps"
    with pytest.raises(ConfigError, match=rf"it is done{told}\n.*nothing but {lengths}$"):
        enter(folder, *overrides)
    assert (folder / SUMMARY_FILE).exists()


def test_it_goes_on_where_it_is_given_more_steps(folder):
    save(folder)
    (folder / SUMMARY_FILE).write_text("{}")
    enter(folder, "algorithm.max_num_steps=99")
    assert not (folder / SUMMARY_FILE).exists()


def test_a_second_run_at_the_same_time_is_refused_and_changes_nothing(folder):
    (unfinished := checkpoint_store(compose_config(), folder).begin(10)).joinpath("weights").write_text("half")
    files = lambda: {path: path.stat().st_mtime_ns for path in folder.rglob("*")}  # noqa: E731
    with locked(folder), status_kept(folder, saves=True):
        before = files()
        process = rf"\(process {os.getpid()} on {socket.gethostname()}\)"
        with pytest.raises(ConfigError, match=f"hydra.run.dir = .*\n.*another process is running there {process}"):
            run(compose_config(), folder, "the command", Callbacks())
        assert files() == before and unfinished.exists()


def test_the_lock_ends_with_the_process_whatever_that_has_started(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(ConfigError, match="another process is running there"), locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with locked(tmp_path):
            pass
    finally:
        holder.kill()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_no_secret_is_in_the_folder_and_settings_are_not_for_everybody(tmp_path):
    overrides = [
        "logger.mlflow.tracking_uri=https://me:s3cret@host",
        "+reward.kwargs.openai_key=s3cret",
        "+generation.vllm_kwargs.hf_token=s3cret",
    ]
    whole_config = described(compose_config(overrides))
    write_start(tmp_path, whole_config, shlex.join(["python", "-m", "nemo_rl_lite.train", *overrides]))
    write_error(tmp_path, WorkerError("policy rank 0", "train", "it met https://me:s3cret@host", "Bearer s3cret"))
    store = checkpoint_store(compose_config(), tmp_path)
    store.begin(1)
    store.finish(1, {}, {"config": whole_config})
    settings = [tmp_path / CONFIG_FILE, tmp_path / COMMAND_FILE, tmp_path / ERROR_FILE, *tmp_path.rglob(RECORD)]
    assert len(settings) == 4
    for file in settings:
        assert "s3cret" not in file.read_text() and "REDACTED" in file.read_text(), file
        assert file.stat().st_mode & 0o007 == 0, file
    # The same command resumes.
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    check_folder(tmp_path, whole_config)
