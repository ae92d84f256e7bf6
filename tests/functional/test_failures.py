"""A worker that raises or dies ends the run soon, says who and why, and nothing stays behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nemo_rl_lite.system.obituary import MESSAGE
from tests.functional.conftest import run_command
from tests.functional.here import run_here
from tests.functional.rewards import METRICS
from tests.functional.supervised import SFT, write_data

pytestmark = pytest.mark.functional

MARK = "NEMO_RL_LITE_TEST_RUN"
# A few seconds on a machine that is not busy; what waits for somebody who is gone would take minutes.
SOON_S = 60
PLAIN = "logger.plots=false"
SMALL = ["algorithm.num_prompts_per_step=16", PLAIN, "generation=transformers"]


class Run:
    """A run in a separate session, as a terminal would start it; an environment variable marks all its processes."""

    def __init__(self, folder: Path, command: list[str], **environment: str):
        self.folder, self.mark = folder, str(folder)
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # What a terminal's shell does; a test run in the background may have inherited an ignored SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env=os.environ | environment | {MARK: self.mark},
        )

    def wait_for(self, pattern: str) -> None:
        """Until a line of standard output matches."""
        for line in self.process.stdout:
            if re.search(pattern, line):
                return
        raise AssertionError(f"the run ended before {pattern!r}: {self.process.stderr.read()[-3000:]}")

    def end(self) -> str:
        """The rest of standard error, once the run is over."""
        _, errors = self.process.communicate(timeout=600)
        return errors

    def worker(self, name: str) -> int:
        return int(re.search(r"process (\d+)", (self.folder / "logs" / f"{name}.log").read_text()).group(1))

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def survivors(self) -> list[psutil.Process]:
        """Processes of the run that stay; those that are about to go are waited for."""
        deadline = time.monotonic() + 60
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.25)
        return left

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
        except psutil.Error:
            return False


@pytest.fixture
def training(tmp_path) -> list[str]:
    """Options of a run with a policy alone, which starts soonest, and which does not end soon."""
    return [*SFT, *write_data(tmp_path), "algorithm.max_num_steps=5000", "algorithm.max_num_epochs=5000", PLAIN]


@pytest.fixture
def start():
    """Begins the command, or another one, in a folder; nothing of it outlives the test."""
    runs = []

    def begin(folder: Path, *overrides: str | Path, command: list[str] | None = None, **environment: str) -> Run:
        runs.append(Run(folder, command or run_command(folder, *overrides), **environment))
        return runs[-1]

    yield begin
    for process in (process for run in runs for process in run.processes()):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_worker_that_raises_is_named_with_phase_and_cause(tmp_path, model_folder, training):
    broken = tmp_path / "broken-model"
    shutil.copytree(model_folder, broken)
    sizes = json.loads((broken / "config.json").read_text())
    # The launcher compares the number of layers and the embedding alone.
    (broken / "config.json").write_text(json.dumps(sizes | {"intermediate_size": 256}))
    done = run_here(tmp_path / "run", broken, *training)
    assert done.returncode == 3 and "starting 1 policy rank" in done.stdout
    assert re.search(r"worker error: policy rank 0 failed in phase 'start': \w*Error", done.stderr)
    assert "Traceback" not in done.stderr
    assert 'File "' in (tmp_path / "run" / "error.txt").read_text()


RAISING_LOSS = """
from nemo_rl_lite.losses.grpo import GRPOLoss


class RaisingLoss(GRPOLoss):
    def __init__(self, options):
        super().__init__(options.loss_fn)

    def __call__(self, logprobs, batch, counts):
        if ((batch.tokens == PERCENT) & (batch.mask == 0)).any():
            raise ValueError("a per cent sign")
        return super().__call__(logprobs, batch, counts)
"""


def test_a_worker_that_raises_in_a_step_ends_the_run(tmp_path, model_folder):
    """A user's loss raises in the second of the steps of two epochs, whose prompts have another token."""
    from transformers import AutoTokenizer

    loss = tmp_path / "own_loss.py"
    percent = AutoTokenizer.from_pretrained(model_folder).convert_tokens_to_ids("%")
    loss.write_text(f"PERCENT = {percent}{RAISING_LOSS}")
    rows = [{"prompt": "1" if row < 16 else "%", "answer": "1"} for row in range(32)]
    data = tmp_path / "problems.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    source = ["data=file", f"data.train_path={data}", f"data.validation_path={data}", "data.shuffle=false"]
    own = [f"algorithm.loss={loss}:RaisingLoss", "algorithm.val_at_start=false", "algorithm.max_num_epochs=2"]
    done = run_here(tmp_path / "run", model_folder, *SMALL, *source, *own)
    assert "step 1/4" in re.sub(" +", " ", done.stdout) and done.returncode == 3, done.stderr
    assert "worker error: policy rank 0 failed in phase 'train': ValueError: a per cent sign" in done.stderr
    assert "Traceback" not in done.stderr and 'File "' in (tmp_path / "run" / "error.txt").read_text()


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_soon(start, tmp_path, model_folder, training):
    run = start(tmp_path / "run", model_folder, *training, "cluster.max_restarts=0")
    run.wait_for("step +2/5000")
    os.kill(run.worker("policy-0"), signal.SIGKILL)
    started = time.monotonic()
    errors = run.end()
    assert time.monotonic() - started < SOON_S
    assert run.process.returncode == 3, errors
    assert "worker error: policy rank 0 failed in phase" in errors
    assert "died" in errors and "Traceback" not in errors
    assert run.survivors() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_process_of_ray_that_dies_is_a_lost_worker(start, tmp_path, model_folder, training, name):
    def begin():
        return start(tmp_path / "run", model_folder, *training, "checkpoint.save_period=1")

    run = begin()
    run.wait_for("step +3/5000")
    (victim,) = [one for one in run.processes() if one.name() == name]
    victim.kill()
    started = time.monotonic()
    if not any("restarting from the last checkpoint (restart 1" in line for line in run.process.stdout):
        # Ray's client has used the object store of its raylet first.
        assert name == "raylet" and MESSAGE in run.end() and run.process.returncode == 1 and run.survivors() == []
        run = begin()
    assert time.monotonic() - started < SOON_S
    run.wait_for("step +[4-9]/5000")
    os.killpg(run.process.pid, signal.SIGTERM)
    errors = run.end()
    assert run.process.returncode == 75 and "Traceback" not in errors, errors
    assert run.survivors() == []


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_behind(start, tmp_path, model_folder, training):
    run = start(tmp_path / "run", model_folder, *training)
    run.wait_for("step +1/5000")
    assert run.processes(), "the mark must be seen on a run that is alive"
    # A terminal sends it to every process of the foreground group.
    os.killpg(run.process.pid, signal.SIGINT)
    errors = run.end()
    assert run.process.returncode == 130
    assert "interrupted" in errors and "Traceback" not in errors
    assert run.survivors() == []
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 0


def test_sigterm_to_the_whole_group_saves_and_leaves_nothing(start, tmp_path, model_folder, training):
    """What `timeout`, Slurm, systemd and a container that closes do."""
    run = start(tmp_path / "run", model_folder, *training, "checkpoint.save_period=1000")
    run.wait_for("step +1/5000")
    ray = [one for one in run.processes() if one.name() in ("gcs_server", "raylet")]
    assert len(ray) == 2 and all(os.getpgid(one.pid) != run.process.pid for one in ray)
    os.killpg(run.process.pid, signal.SIGTERM)
    errors = run.end()
    assert run.process.returncode == 75, errors
    assert "SIGTERM was received" in errors and "Traceback" not in errors
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
    ended = time.monotonic()
    assert run.survivors() == [] and time.monotonic() - ended < SOON_S


def test_an_environment_that_always_hangs_ends_the_run(tmp_path, model_folder):
    options = ["environment.name=tests.functional.waiting.Hangs", "environment.max_turns=2"]
    options += ["environment.timeout_s=1", "algorithm.val_at_start=false", "policy.train_global_batch_size=16"]
    started = time.monotonic()
    done = run_here(tmp_path / "run", model_folder, *SMALL, *options, "algorithm.num_prompts_per_step=2")
    assert done.returncode == 2 and time.monotonic() - started < SOON_S
    assert re.search(r"the environment failed on (\d+) of \1 samples, .*environment.max_failure_fraction", done.stderr)
    assert "no answer within environment.timeout_s = 1" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_a_second_sigterm_ends_a_run_within_its_step(tmp_path, model_folder, monkeypatch):
    """The first one lets the step be finished."""
    monkeypatch.setenv(METRICS, str(tmp_path / "run" / "metrics.jsonl"))
    own = ["reward.name=tests.functional.rewards.terminate_twice", "reward.timeout_s=null"]
    options = [*own, "algorithm.val_at_start=false"]
    done = run_here(tmp_path / "run", model_folder, *SMALL, *options)
    assert done.returncode == 75 and "interrupted" in done.stderr and "Traceback" not in done.stderr
    assert "step 1/30" in re.sub(" +", " ", done.stdout) and "step 2/30" not in re.sub(" +", " ", done.stdout)


def test_a_signal_while_workers_start_leaves_no_process_behind(start, tmp_path):
    script = Path(__file__).with_name("starting_workers.py")
    run = start(tmp_path / "run", command=[sys.executable, str(script), str(tmp_path / "run")])
    log = tmp_path / "run" / "logs" / "policy-0.log"
    while not (log.exists() and "slow" in log.read_text()):
        assert run.process.poll() is None
        time.sleep(0.1)
    assert run.processes(), "the mark must be seen on a run that is alive"
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert run.process.returncode == 130
    assert run.survivors() == []
