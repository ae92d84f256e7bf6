"""Steps of a run again, from its saved rollouts."""

import shutil

import pytest

from nemo_rl_lite import replay, why
from tests.functional.here import leaving_nothing, train_here, without_ray
from tests.functional.test_resume import assert_same_weights, metrics_of
from tests.functional.test_turn_credit import BY_TURN, OWN, RUN, TURN

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


def replayed(*arguments: str) -> None:
    with leaving_nothing(), without_ray():
        replay.main([*map(str, arguments)])


def test_unchanged_settings_give_the_same_weights(run, tmp_path, monkeypatch, capsys):
    """Step 4 does not follow a checkpoint, so step 3 is repeated first."""
    monkeypatch.chdir(tmp_path)
    replayed(run, "--step", "4", "checkpoint.export_hf_at_end=true")
    said = capsys.readouterr().out
    folder = tmp_path / said.splitlines()[-1]
    assert "step 3 again, unchanged, from the checkpoint of step 2" in said
    assert_same_weights(folder / "hf", run / "hf")
    own, whole = metrics_of(folder), metrics_of(run)
    names = {name for step, name in own if step == 4 and name.startswith("train/")}
    assert {"train/loss", "train/grad_norm", "train/reward", "train/kl_penalty"} <= names
    assert {name for name in names if own[4, name] != whole[4, name]} == set()
    # The replay has samples and scores, too.
    why.main([str(folder), "--step", "4"])


def test_each_value_of_a_sweep_is_a_replay(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    replayed(run, "--step", "3", "-m", f"{LOSS}.ratio_clip_max=0.28,0.001", f"{LOSS}.ratio_clip_min=0.2")
    said = capsys.readouterr().out
    folder = tmp_path / said.splitlines()[-1]
    same, other, whole = (metrics_of(one) for one in (folder / "0", folder / "1", run))
    assert same[3, "train/loss"] == whole[3, "train/loss"] != other[3, "train/loss"]
    assert other[3, "train/clip_ratio/high"] > whole[3, "train/clip_ratio/high"]
    assert f"{LOSS}.ratio_clip_max=0.001" in said and (3, "validation/accuracy") not in same


def test_samples_that_are_missing_are_told(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "short")
    next((tmp_path / "short" / "rollouts").glob("step-00000003-train.parquet")).unlink()
    with pytest.raises(SystemExit) as ended:
        replay.main([str(tmp_path / "short"), "--step", "3"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "has no rollout of step 3" in error and "a step from 1 to 4" in error
