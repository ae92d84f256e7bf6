"""Supervised fine-tuning, whole runs, with real Megatron in this process."""

import json
import re

import pytest

from nemo_rl_lite.models.embedded import MODEL_CONFIG
from nemo_rl_lite.models.flops import matrix_weights
from nemo_rl_lite.models.shape import model_shape
from tests.functional.here import run_here, train_here
from tests.functional.supervised import SFT, Scorer, packed, read_rows, series, write_data
from tests.metric_names import not_logged, undocumented

pytestmark = pytest.mark.functional


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("sft")
    return folder / "run", *train_here(folder / "run", model_folder, *SFT, *write_data(folder), plots=True)


def test_the_loss_falls_in_training_and_on_held_out_chats(run):
    _, _, metrics = run
    losses, held_out = series(metrics, "train/loss"), series(metrics, "validation/val_loss")
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.3
    assert len(held_out) == 2 and held_out[-1] < held_out[0] - 0.3
    assert series(metrics, "train/epoch")[-1] == 1.5


def test_the_losses_are_those_transformers_computes(run, model_folder):
    """The held-out loss before the first step and after the last, from the starting and the exported weights."""
    folder, _, metrics = run
    rows = read_rows(folder.parent / "validation.jsonl")
    expected = [Scorer(path).loss(rows) for path in (model_folder, folder / "hf")]
    assert series(metrics, "validation/val_loss") == pytest.approx(expected, abs=1e-4)


def test_rates_are_those_of_the_models_flops(run):
    """Of training: three passes of each token through all matrices, and a little for attention to a few tokens."""
    _, _, metrics = run
    shape = model_shape(MODEL_CONFIG)
    names = ("performance/train_flops_per_gpu", "timing/train/policy_training", "train/total_num_tokens")
    for rate, seconds, tokens in zip(*(series(metrics, name) for name in names), strict=True):
        matrices = 3 * 2 * matrix_weights(shape, experts=0) * tokens
        assert 1 < rate * 1e12 * seconds / matrices < 1.1


def test_every_metric_is_documented_and_logged_and_none_is_of_generation(run):
    _, _, metrics = run
    names = set().union(*metrics)
    assert undocumented(names) == [] and not_logged(names, "all", "SFT") == []
    assert not any(name.startswith(("refit/", "timing/train/generation")) for name in names)


def test_the_run_folder_is_complete_and_nothing_generated(run):
    folder, output, _ = run
    for name in ("config.json", "command.txt", "metrics.jsonl", "summary.json", "report.html", "hf/config.json"):
        assert (folder / name).stat().st_size > 0, name
    assert [path.name for path in (folder / "logs").iterdir()] == ["policy-0.log"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val_loss_after"] < summary["val_loss_before"] and list(summary["seconds_by_phase"]) == ["train"]
    assert output.count("step ") >= 6 and "held-out loss" in output and "reward" not in output


def test_packed_sequences_train_as_padded_ones_do(run, tmp_path, model_folder):
    """With a validation set that micro-batches do not divide."""
    _, _, expected = run
    options = [*packed(SFT, 64), *write_data(tmp_path), "algorithm.max_val_samples=13"]
    _, metrics = train_here(tmp_path / "run", model_folder, *options)
    assert series(metrics, "train/loss") == pytest.approx(series(expected, "train/loss"), abs=1e-4)


def test_what_was_trained_is_there_although_its_checkpoint_cannot_be_written(tmp_path, model_folder):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").write_text("a file is in the way")
    short = ["algorithm.max_num_steps=1", "algorithm.val_at_start=false", "logger.plots=false"]
    done = run_here(folder, model_folder, *SFT, *write_data(tmp_path), *short)
    assert done.returncode == 1 and re.search(r"the checkpoint of step \d+ was not written", done.stderr)
    assert (folder / "hf" / "model.safetensors").exists()
