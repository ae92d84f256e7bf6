"""`nrl-lite evaluate` on the embedded model: its numbers and files, a cut and its continuation, what it refuses."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_lite import evaluate
from nemo_rl_lite.evaluation import evaluate as evaluate_module
from nemo_rl_lite.rollout.store import read_rollout
from tests.functional.conftest import PYTHONPATH

pytestmark = pytest.mark.functional

PROBLEMS, SAMPLES = 10, 3
ROWS = "rollouts/step-00000000-validation.parquet"
# The untrained model knows no answer; this is right now and then, and tells of each response that it judges.
REWARD = """
import json, os, re, signal
def even(response, answer):
    judged = open(os.environ["JUDGED"], "a+")
    judged.seek(0)
    place = len(judged.read().split()) + 1
    if place == int(os.environ.get("CUT_AT", 0)):
        signal.raise_signal(signal.SIGINT)
    for rank in json.loads(os.environ.get("KILLED", "{}")).get(str(place), ()):
        log = open(os.path.join(os.environ["LOGS"], f"generation-{rank}.log")).read()
        os.kill(int(re.findall(r"process (\\d+)", log)[-1]), signal.SIGKILL)
    judged.write(answer + "\\n")
    judged.close()
    return float(sum(response.encode()) % 3 == 0)
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """What an engine sets in the environment ends with the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ["JUDGED"] = str(tmp_path / "judged")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, whatever an earlier run in this process has made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def judged(tmp_path: Path) -> list[str]:
    file = tmp_path / "judged"
    return file.read_text().split() if file.exists() else []


def command(tmp_path: Path, model: Path, *more: str) -> list[str]:
    """The arguments of an evaluation whose engine has four requests at a time."""
    (tmp_path / "mine.py").write_text(REWARD)
    options = [f"--problems={PROBLEMS}", f"--samples={SAMPLES}", f"--output={tmp_path / 'out'}"]
    reward = [f"reward.name={tmp_path / 'mine.py'}:even", "reward.timeout_s=null"]
    return [
        str(model),
        "data=reverse_digits",
        *options,
        "generation.backend=transformers",
        "generation.vllm_cfg.max_num_seqs=4",
        *reward,
        *more,
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_folder) -> list[dict]:
    """The samples of an evaluation with one engine that nothing cuts."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ | {"JUDGED": str(folder / "judged")})
        assert status(*command(folder, model_folder)) == 0
    return rows(folder / "out")


def status(*arguments: str) -> int:
    try:
        evaluate.main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def rows(folder: Path) -> list[dict]:
    """The samples, without their times."""
    return [{name: value for name, value in row.items() if name != "spans"} for row in read_rollout(folder / ROWS)]


def test_a_table_numbers_and_every_response(tmp_path, model_folder, capsys):
    assert status(*command(tmp_path, model_folder)) == 0
    found, samples = json.loads((tmp_path / "out" / "summary.json").read_text()), rows(tmp_path / "out")
    rewards = np.array([row["reward"] for row in samples]).reshape(PROBLEMS, SAMPLES)
    right, wrong = rewards.sum(axis=1), SAMPLES - rewards.sum(axis=1)
    assert 0 < right.sum() < rewards.size, "the test's reward tells nothing"
    assert found["avg"]["value"] == pytest.approx(rewards.mean())
    at_two = [1 - math.comb(int(one), 2) / math.comb(SAMPLES, 2) for one in wrong]
    expected = {"1": rewards.mean(), "2": np.mean(at_two), "3": np.mean(right > 0)}
    assert {k: one["value"] for k, one in found["pass_at_k"].items()} == pytest.approx(expected)
    assert all(one["low"] <= one["value"] <= one["high"] for one in (found["avg"], *found["pass_at_k"].values()))
    assert found["mean_length"] == pytest.approx(np.mean([row["tokens"] for row in samples]))
    assert found["truncated_share"] == pytest.approx(np.mean([row["ending"] == "length" for row in samples]))
    assert found["reward_errors"] == 0 and found["sampling"]["temperature"] == 1.0 and found["seed"] == 42
    assert [(row["problem"], row["sample"]) for row in samples] == list(np.ndindex(PROBLEMS, SAMPLES))
    assert all(row["prompt"] and row["answer"] and row["prompt_tokens"] > 0 for row in samples)
    said = capsys.readouterr().out
    assert f"avg@{SAMPLES}" in said and f"pass@{SAMPLES}" in said and f"{found['avg']['value']:.4f}" in said
    # The same command again has nothing to sample: it tries the reward once, as every command does.
    before = len(judged(tmp_path))
    assert status(*command(tmp_path, model_folder)) == 0
    assert len(judged(tmp_path)) == before + 1 and rows(tmp_path / "out") == samples
    # Another configuration is refused, by its first key.
    capsys.readouterr()
    assert status(*command(tmp_path, model_folder, "generation.top_p=0.9")) == 2
    refused = capsys.readouterr().err
    assert "1 problem found" in refused and "generation.top_p = 0.9" in refused and "--output FOLDER" in refused


@pytest.mark.usefixtures("interruptible")
def test_a_cut_evaluation_continues_and_is_the_same(whole, tmp_path, model_folder, capsys, monkeypatch):
    monkeypatch.setattr(evaluate_module, "_EVERY_S", 0.0)
    os.environ["CUT_AT"] = "12"
    assert status(*command(tmp_path, model_folder)) == evaluate.INTERRUPTED
    assert "the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "out" / "summary.json").exists()
    kept = [file for file in (tmp_path / "out" / "groups").iterdir() if file.suffix == ".parquet"]
    assert kept, "nothing was kept of what was sampled before the cut"
    del os.environ["CUT_AT"]
    (tmp_path / "judged").unlink()
    assert status(*command(tmp_path, model_folder)) == 0
    assert "problems are done in" in capsys.readouterr().out
    # One more than the missing samples, for the trial call.
    assert 1 < len(judged(tmp_path)) < PROBLEMS * SAMPLES + 1 and len(judged(tmp_path)) % SAMPLES == 1
    assert rows(tmp_path / "out") == whole


@pytest.mark.slow
def test_engines_take_over_from_one_that_dies_start_again_when_all_have_and_the_command_continues(
    whole, tmp_path, model_folder
):
    """In a process of its own with two engines. Ranks are killed when so many responses are judged; more are missing at
    each place than two engines have at a time, so that there is still something to sample."""
    killed = {"6": [0], "12": [1], "20": [0, 1]}
    given = [sys.executable, "-m", "nemo_rl_lite.evaluate", *command(tmp_path, model_folder)]
    given += ["generation.data_parallel_size=2", "cluster.max_restarts=1"]
    told = {"PYTHONPATH": PYTHONPATH, "KILLED": json.dumps(killed), "LOGS": str(tmp_path / "out" / "logs")}
    done = subprocess.run(
        given, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | told, timeout=1000
    )
    assert "2 engines" in done.stdout and "the other engines take over its requests" in done.stdout
    assert "no engine is left: restarting (0 restarts left" in done.stdout
    assert done.returncode == 3, done.stderr[-3000:]
    error = done.stderr.splitlines()[-1]
    assert "never retrieved" not in done.stderr
    assert "generation rank" in error and "the process died" in error and "the same command continues" in error
    assert not (tmp_path / "out" / "summary.json").exists()
    # With one engine it is the same evaluation, of which two have sampled a part.
    assert len([file for file in (tmp_path / "out" / "groups").iterdir() if file.suffix == ".parquet"]) > 1
    assert status(*command(tmp_path, model_folder)) == 0
    assert rows(tmp_path / "out") == whole


def test_greedy_in_a_folder_of_its_own(tmp_path, model_folder, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--problems=2", "--temperature=0", "data=reverse_digits", "generation=transformers"]
    assert status(str(model_folder), *words) == 0
    (folder,) = (tmp_path / "outputs" / "evaluations").iterdir()
    assert folder.name.startswith(f"{model_folder.name}-reverse_digits-")
    assert json.loads((folder / "summary.json").read_text())["sampling"]["temperature"] == 0
    assert "pass@1" in capsys.readouterr().out
