"""Trainings from Python: whole runs in this process, and ten with a real Ray in another."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from nemo_rl_lite import DPO, GRPO, SFT, Trainer, TrainingResult
from nemo_rl_lite.checkpoint.store import CheckpointStore, Retention
from nemo_rl_lite.errors import CallbackError, LauncherError
from nemo_rl_lite.system.stopping import SIGNALS
from tests.functional.conftest import PYTHONPATH, ROOT
from tests.functional.here import leaving_nothing, run_here, without_ray
from tests.functional.trainings import OFFLINE, PAIRS, PROBLEMS, SMALL

pytestmark = pytest.mark.functional

DATA = {"data": PROBLEMS[:40], "eval_data": PROBLEMS[40:]}
HERE = SMALL | {"generation": "transformers"}


def train(trainer: Trainer) -> TrainingResult:
    """Train in this process as a cell of a notebook does: an event loop is running."""

    async def cell() -> TrainingResult:
        return trainer.train()

    with leaving_nothing(), without_ray():
        return asyncio.run(cell())


def test_one_process_trains_by_several_algorithms_and_a_command_repeats_it(tmp_path, model_folder, capsys):
    scale, steps, rollouts = 0.25, [], []
    # An earlier test in this process may have called the command, which sets handlers.
    handlers = [signal.getsignal(one) for one in SIGNALS]

    def score(response, answer):
        return scale * len(set(response) & set(answer))

    done = train(
        GRPO(
            model_folder,
            reward={score: 2, lambda response, answer: len(response) / 8: 0.5},
            output_dir=tmp_path / "grpo",
            on_step=steps.append,
            on_rollout=lambda step, rows: rollouts.append((step, rows[0]["split"], len(rows))),
            **DATA,
            **HERE,
        )
    )
    assert [one["step"] for one in steps] == [1, 2] and all("policy/" not in name for name in steps[0])
    assert rollouts == [(0, "validation", 8), (1, "train", 16), (2, "train", 16), (2, "validation", 8)]
    assert not done.stopped and done.summary.steps == 2
    assert done.metrics["train/reward"] == steps[-1]["train/reward"] > 0
    assert done.metrics["train/reward"] == pytest.approx(
        2 * done.metrics["train/reward/score"] + 0.5 * done.metrics["train/reward/lambda"], rel=1e-5
    )
    model, tokenizer = done.load()
    assert model.config.vocab_size >= len(tokenizer)
    command = shlex.split((tmp_path / "grpo" / "command.txt").read_text())
    own = [one for one in command[3:] if not one.startswith(("hydra.run.dir=", "policy.model_name="))]
    assert run_here(tmp_path / "again", model_folder, *own).returncode == 0
    again = TrainingResult(tmp_path / "again", done.summary, False).metrics
    assert {name: again[name] for name in again if name.startswith(("train/reward", "train/loss"))} == {
        name: value for name, value in done.metrics.items() if name.startswith(("train/reward", "train/loss"))
    }
    sft = train(SFT(model_folder, output_dir=tmp_path / "sft", **DATA, **OFFLINE))
    data = {"data": PAIRS[:40], "eval_data": PAIRS[40:]}
    dpo = train(DPO(sft.model_path, output_dir=tmp_path / "dpo", **data, **OFFLINE))
    assert sft.summary.steps == dpo.summary.steps == 2 and dpo.metrics["train/loss"] > 0
    assert [signal.getsignal(one) for one in SIGNALS] == handlers


@pytest.mark.parametrize("source", ["on_policy", "queue"])
def test_a_run_that_is_stopped_has_a_model_and_is_resumed(tmp_path, model_folder, source):
    keys = HERE | {"save_period": 10, "val_at_start": False, "source": source}
    if source == "queue":
        correction = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2}
        keys |= {"colocated": {"enabled": False}, "loss_fn": correction}

    def run(steps, on_step=None):
        own = keys | {"output_dir": tmp_path, "on_step": on_step, "max_num_steps": steps}
        return train(GRPO(model_folder, reward="last_number", **DATA, **own))

    stopped = run(9, lambda metrics: "stop" if metrics["step"] == 2 else None)
    assert stopped.stopped and stopped.summary.steps == 2 and stopped.model_path.is_dir()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    store = CheckpointStore(tmp_path / "checkpoints", Retention(1, 0, None, True))
    assert [one.step for one in store.complete()] == [2]
    resumed = run(3)
    assert not resumed.stopped and resumed.metrics["step"] == 3
    assert [one["step"] for one in resumed.history if "train/loss" in one] == [1, 2, 3]


def test_an_error_of_a_callback_ends_the_run_and_its_status_says_so(tmp_path, model_folder):
    def fail(step, rows):
        raise KeyError(f"step {step}")

    trainer = GRPO(model_folder, reward="last_number", output_dir=tmp_path, on_rollout=fail, **DATA, **HERE)
    with pytest.raises(CallbackError, match=r"on_rollout raised KeyError: 'step 0' \(test_python_api.py, line \d+\)"):
        train(trainer)
    assert "on_rollout raised" in json.loads((tmp_path / "status.json").read_text())["message"]
    with pytest.raises(LauncherError, match="has exported no model"):
        _ = TrainingResult(tmp_path, None, False).model_path


@pytest.mark.slow
def test_ten_trainings_in_one_process_leave_nothing(tmp_path, model_folder):
    script = ROOT / "tests" / "functional" / "trainings.py"
    done = subprocess.run(
        [sys.executable, script, "10", tmp_path, model_folder],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    states = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    before, first, last = states[0], states[1], states[-1]
    assert len(states) == 11
    for name in ("children", "threads", "ports", "handlers", "logging", "environment"):
        assert all(one[name] == before[name] for one in states), name
    # What the first training has imported stays, and Ray keeps three files of each.
    assert last["native threads"] <= first["native threads"] + 2 and last["files"] <= first["files"] + 3 * 9
    assert last["MiB"] < first["MiB"] + 50
