"""Runs with rollout workers are those of the launcher alone, also if workers or engines die."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from pyarrow import parquet

from nemo_rl_lite.observability.summary import SUMMARY_FILE
from tests.functional.conftest import PYTHONPATH, run_command, train
from tests.functional.here import train_here
from tests.functional.rewards import Gate
from tests.functional.test_recovery import TASK, assert_same_run

pytestmark = pytest.mark.functional

GRPO = [
    "algorithm.max_num_steps=4",
    "generation.colocated.enabled=false",
    "environment=calculator",
    "environment.max_turns=2",
    "algorithm.use_dynamic_sampling=true",
    # Otherwise, timing decides how many prompts are sampled in vain.
    "algorithm.oversample=1.0",
    # It reads tokens, which a rollout worker counts.
    "algorithm.loss_fn.policy_loss=kl_cov",
    *TASK,
]
ONE_STEP_OFF = [
    "algorithm.rollouts.source=one_step_off",
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
]
TRAIN = "nemo_rl_lite.train"
TWO = ["algorithm.rollouts.num_workers=2", "generation.data_parallel_size=2"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model_folder) -> Path:
    """A run without rollout workers."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_here(folder, model_folder, *GRPO)
    return folder


def hit(
    folder: Path, model: Path, victims: tuple[str, ...], *overrides: str, program: tuple[str, ...] = ("-m", TRAIN)
) -> str:
    """Train, and kill the processes of these logs after the first step; standard output."""
    gate, output = Gate(folder), ""
    command = run_command(folder, model, "logger.plots=false", *GRPO, *overrides, *gate.overrides)
    command[1:3] = program
    environ = os.environ | gate.environment | {"PYTHONPATH": PYTHONPATH}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        for line in process.stdout:
            output += line
            if line.startswith("step 1/"):
                # Rewards of step 2 wait for the gate.
                time.sleep(1)
                for log in victims:
                    pids = re.findall(r"process (\d+)", (folder / "logs" / log).read_text())
                    os.kill(int(pids[-1]), signal.SIGKILL)
                gate.passed(99)
        assert process.wait(timeout=600) == 0, output
    finally:
        process.kill()
    return output


@pytest.mark.slow
def test_a_killed_rollout_worker_is_named_and_costs_nothing(tmp_path, model_folder, alone):
    said = hit(tmp_path / "run", model_folder, ("rollouts-1.log",), *TWO)
    assert "rollouts rank 1 failed in phase 'rollouts': the process died" in said
    assert "rollouts rank 1 has restarted" in said and "restarting from the last checkpoint" not in said
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_rollout_worker_that_loses_its_engine_gives_its_groups_away(tmp_path, model_folder, alone):
    said = hit(tmp_path / "run", model_folder, ("generation-0.log",), *TWO)
    assert re.search(r"generation rank 0 failed in phase '\w+': the process died", said)
    assert "the engine has restarted" in said and "restarting from the last checkpoint" not in said
    assert_same_run(tmp_path / "run", alone)


# Runs the command. It kills rollout worker 1 in the third call of one function, and worker 0 in the fourth of another.
KILLING = """
import os, re, runpy, signal, sys
from pathlib import Path

from nemo_rl_lite.algorithms.grpo import GRPO
from nemo_rl_lite.workers.policy import RemotePolicy

logs = Path(sys.argv.pop(1))

def kill_in(owner, name, call, worker):
    called, calls = getattr(owner, name), []

    def killing(*arguments, **options):
        calls.append(name)
        if len(calls) == call:
            log = (logs / f"rollouts-{worker}.log").read_text()
            os.kill(int(re.findall(r"process (\\d+)", log)[-1]), signal.SIGKILL)
        return called(*arguments, **options)

    setattr(owner, name, killing)

kill_in(GRPO, "_advantages", 3, 1)
kill_in(RemotePolicy, "put_batch", 4, 0)
runpy.run_module("nemo_rl_lite.train", run_name="__main__")
"""


def test_rollout_workers_and_an_engine_may_die_and_the_run_is_that_of_the_launcher(tmp_path, model_folder, alone):
    """A worker together with its engine, and both workers before the policy has their rows."""
    folder = tmp_path / "run"
    program = ("-c", KILLING, str(folder / "logs"))
    said = hit(folder, model_folder, ("rollouts-0.log", "generation-0.log"), *TWO, program=program)
    assert "the engine has restarted" in said and "restarting from the last checkpoint" not in said
    assert said.count("rollouts rank 0 has restarted") == 2 and said.count("rollouts rank 1 has restarted") == 1
    assert_same_run(folder, alone)
    assert len(list((folder / "rollouts").glob("step-00000001-*-train.parquet"))) == 2


def test_one_step_off_runs_resume_with_any_number_of_rollout_workers(tmp_path, model_folder):
    own = [
        *GRPO,
        *ONE_STEP_OFF,
        "checkpoint.save_period=1",
        "checkpoint.keep_newest=9",
        "generation.data_parallel_size=2",
    ]
    alone = tmp_path / "alone"
    train_here(alone, model_folder, *own, elsewhere=["generation"])

    two = resumable(alone, tmp_path / "two", done=1)
    saved = saved_rows(two, done=1, step=2)
    assert set(saved) == {"rollout-00000002"} and sum(saved.values()) >= 64
    train(two, model_folder, *own, "algorithm.rollouts.num_workers=2")
    assert_same_run(two, alone)

    last = resumable(two, tmp_path / "none", done=2)
    saved = saved_rows(last, done=2, step=3)
    assert saved.pop("rollout-00000003") == 0 and len(saved) == 2 and sum(saved.values()) >= 64
    train_here(last, model_folder, *own, elsewhere=["generation"])
    assert_same_run(last, alone)


def resumable(folder: Path, target: Path, done: int) -> Path:
    """Copy a run as it was after the checkpoint of a step."""
    shutil.copytree(folder, target)
    shutil.rmtree(target / "hf")
    (target / SUMMARY_FILE).unlink()
    for checkpoint in sorted((target / "checkpoints").glob("step-*"))[done:]:
        shutil.rmtree(checkpoint)
    return target


def saved_rows(folder: Path, done: int, step: int) -> dict[str, int]:
    """Count the episodes in the files of a rollout in a checkpoint."""
    files = (folder / "checkpoints" / f"step-{done:08d}").glob(f"rollout-{step:08d}*.parquet")
    return {file.stem: parquet.read_metadata(file).num_rows for file in files}
