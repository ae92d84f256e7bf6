"""The scripts that compare what algorithms learn: commands compose, runs share a GPU, the picture follows records."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nemo_rl_lite.validation.compose import compose_config

ROOT = Path(__file__).parents[3]
FAKE = """#!/bin/bash
folder=${@: -1}
mkdir -p "${folder#hydra.run.dir=}"
echo '{"step": 1, "train/reward": 0.5}' > "${folder#hydra.run.dir=}/metrics.jsonl"
case "$*" in *forever*) exec sleep 60;; *broken*) exit 3;; esac
sleep 0.5
"""


@pytest.fixture
def scripts(monkeypatch):
    """Import modules of scripts/bench by name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    return importlib.import_module


def test_every_tasks_and_algorithms_command_composes(scripts):
    learning = scripts("learning")
    for task in learning.TASKS:
        given = SimpleNamespace(model=Path("Qwen/Qwen3-1.7B"), task=task, steps=3, override=[])
        config = compose_config(learning.overrides(given, "grpo", 1))
        assert config.algorithm.max_num_steps == 3 and config.algorithm.loss_fn.reference_policy_kl_penalty == 0


def test_a_killed_script_leaves_no_training_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, time\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts' / 'bench')!r})\n"
        "from learning import end_with_the_script\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=end_with_the_script)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_runs_share_a_gpu_and_end_at_the_limit(scripts, tmp_path, monkeypatch):
    together = scripts("learning")
    fake = tmp_path / "fake"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(together, "STAGGER_S", 0.0)
    # Where the tests run in the background, a process that they start ignores the interrupt.
    monkeypatch.setattr(together, "GRACE_S", 1.0)
    kinds = {"short": [], "bad": ["broken"], "long": ["forever"]}
    trainings = [together.Training(name, overrides, tmp_path) for name, overrides in kinds.items()]
    began, ended = time.monotonic(), []
    together.run_together(trainings, 2, 1, 3.0, ended.append)
    # The limit is 3 s, and the long one takes 60.
    assert time.monotonic() - began < 45
    statuses = {one.name: one.process.returncode for one in ended}
    assert statuses["short"] == 0 and statuses["bad"] == 3 and statuses["long"] not in (0, 3)
    assert all(together.metrics_of(one.place) == [{"step": 1, "train/reward": 0.5}] for one in ended)


def test_a_record_is_continued_with_the_runs_that_have_not_finished(scripts, tmp_path, monkeypatch):
    learning, kept = scripts("learning"), tmp_path / "kept.json"
    kept.write_text(json.dumps({"runs": [run("grpo", 1), run("dapo", 1) | {"finished": False}]}))
    begun = []
    monkeypatch.setattr(learning, "run_together", lambda jobs, *rest: begun.extend(job.name for job in jobs))
    command = "small gcd --algorithms grpo dapo gspo --seeds 1 2 --only grpo:1 dapo:1 gspo:2"
    learning.main([*command.split(), "--continue", str(kept)])
    assert begun == ["dapo-1", "gspo-2"]


def test_the_picture_is_stale_when_the_runs_change(scripts, tmp_path, monkeypatch):
    figure = scripts("learning_figure")
    monkeypatch.setattr(figure, "PICTURE", tmp_path / "learning.svg")
    records = [{"bench": "learning-gcd", "task": "gcd", "runs": [run("grpo", 1), run("gspo", 1)]}]
    assert figure.is_stale(records)
    figure.draw(records)
    assert not figure.is_stale(records)
    records[0]["runs"].append(run("gspo", 2))
    assert figure.is_stale(records)
    figure.draw([])
    assert not figure.is_stale([]) and not figure.PICTURE.exists()


def test_an_interval_over_seeds_is_that_of_student(scripts):
    runs = [run("grpo", seed) for seed in (1, 2, 3)]
    for one, accuracy in zip(runs, (0.4, 0.5, 0.6), strict=True):
        one["validation"][-1]["accuracy"] = accuracy
    interval_of_seeds = scripts("learning_figure").interval_of_seeds
    # 4.303 standard deviations of the mean, with two degrees of freedom.
    assert interval_of_seeds(runs) == pytest.approx((0.5 - 0.2484, 0.5 + 0.2484), abs=1e-3)
    assert interval_of_seeds(runs[:1]) is None


def test_a_problem_is_one_observation_of_several_seeds(scripts):
    one, other = run("grpo", 1), run("grpo", 2)
    one["validation"][-1]["right"], other["validation"][-1]["right"] = "1100", "1000"
    mean, low, high = scripts("learning_figure").over_seeds([one, other], -1)
    assert mean == pytest.approx(3 / 8) and low < mean < high


def run(algorithm: str, seed: int) -> dict:
    point = {"accuracy": 0.5, "problems": 4, "commonest_answer": 0.25, "right": "0101"}
    return {
        "algorithm": algorithm,
        "seed": seed,
        "finished": True,
        "validation": [{"step": step, **point} for step in (0, 9)],
    }
