"""Steps of a run again, from its saved rollouts."""

import shutil

import pytest

from nemo_rl_lite import replay, why
from nemo_rl_lite.run.command import launch
from tests.functional.here import leaving_nothing, train_here, without_ray
from tests.functional.test_resume import assert_same_weights, metrics_of
from tests.functional.test_turn_credit import BY_TURN, OWN, RUN, TURN
from tests.unit.run.test_why import data_of

pytestmark = pytest.mark.functional

LOSS = "algorithm.loss_fn"
# Two turns with their own advantages, a penalty for length, and two passes with a KL penalty.
SETTINGS = [*RUN, *TURN, *BY_TURN, OWN, "algorithm.num_iterations=2", "algorithm.max_num_steps=4"]
SETTINGS += ["algorithm.val_period=0", "checkpoint.keep_newest=3", f"{LOSS}.reference_policy_kl_penalty=0.1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train_here(folder, model_folder, *SETTINGS)
    return folder


@pytest.fixture
def replayed(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder; its output, and the folder of the replay."""

    def launch_here(arguments):
        with leaving_nothing(), without_ray():
            launch(arguments)

    def run_command(*arguments):
        replay.main([*map(str, arguments)])
        said = capsys.readouterr().out
        return said, tmp_path / said.splitlines()[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nemo_rl_lite.run.replay.launch", launch_here)
    return run_command


def test_unchanged_settings_give_the_same_weights(run, replayed):
    """Step 4 does not follow a checkpoint, so step 3 is repeated first."""
    said, folder = replayed(run, "--step", "4", "checkpoint.export_hf_at_end=true")
    assert "step 3 again, unchanged, from the checkpoint of step 2" in said
    assert_same_weights(folder / "hf", run / "hf")
    own, whole = metrics_of(folder), metrics_of(run)
    names = {name for step, name in own if step == 4 and name.startswith("train/")}
    assert {"train/loss", "train/grad_norm", "train/reward", "train/kl_penalty"} <= names
    assert {name for name in names if own[4, name] != whole[4, name]} == set()
    # The replay has samples and scores, too.
    why.main([str(folder), "--step", "4"])
    totals = data_of(folder / "why-step-4.html")["totals"]
    assert totals["sum of all tokens"] == pytest.approx(own[4, "train/loss"], abs=1e-6)
    assert totals["logged loss"] == own[4, "train/loss"] and set(totals) > {"policy term", "KL penalty"}


def test_another_loss_changes_what_follows_from_it(run, replayed):
    said, folder = replayed(run, "--step", "3", f"{LOSS}.ratio_clip_max=0.001")
    own, whole = metrics_of(folder), metrics_of(run)
    assert own[3, "train/reward"] == whole[3, "train/reward"] and own[3, "train/loss"] != whole[3, "train/loss"]
    assert own[3, "train/clip_ratio/high"] > whole[3, "train/clip_ratio/high"]
    assert "ratio_clip_max: 0.28 -> 0.001" in said and "grad_norm" in said
    assert {step for step, _ in own} == {3} and (3, "validation/accuracy") not in own


def test_samples_that_are_missing_are_told(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "short")
    next((tmp_path / "short" / "rollouts").glob("step-00000003-train.parquet")).unlink()
    with pytest.raises(SystemExit) as ended:
        replay.main([str(tmp_path / "short"), "--step", "3"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "has no rollout of step 3" in error and "steps from 1 to 4" in error
