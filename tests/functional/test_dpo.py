"""Preferences (DPO, KTO, ORPO), whole runs, with real Megatron in this process."""

import pytest
import torch

from tests.functional.here import train_here
from tests.functional.supervised import DPO, OF_PAIRS, Scorer, packed, read_rows, series, write_labelled, write_pairs
from tests.metric_names import not_logged, undocumented

pytestmark = pytest.mark.functional


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("dpo")
    return folder / "run", *train_here(folder / "run", model_folder, *DPO, *write_pairs(folder), plots=True)


def test_the_policy_comes_to_prefer_what_was_chosen(run):
    _, output, metrics = run
    losses, accuracies = series(metrics, "validation/val_loss"), series(metrics, "validation/accuracy")
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and accuracies[0] == 0.5
    assert losses[-1] < 0.6 and accuracies[-1] > 0.9
    assert series(metrics, "train/loss")[0] == pytest.approx(0.6931, abs=1e-4)
    assert series(metrics, "train/rewards_margin_mean")[-1] > 0.1
    assert "preference accuracy" not in output and "held-out accuracy" in output
    names = set().union(*metrics)
    assert undocumented(names) == [] and not_logged(names, "all", "DPO") == []


def test_losses_and_margins_are_those_transformers_computes(run, model_folder):
    """On the held-out pairs, from the exported weights and the starting ones."""
    folder, _, metrics = run
    start, end = Scorer(model_folder), Scorer(folder / "hf")

    def reward(prompt: str, response: str) -> float:
        return (end.logprobs(prompt, response) - start.logprobs(prompt, response)).sum().item()

    rows = read_rows(folder.parent / "validation.jsonl")
    margins = [reward(row["prompt"], row["chosen"]) - reward(row["prompt"], row["rejected"]) for row in rows]
    expected = -torch.nn.functional.logsigmoid(0.1 * torch.tensor(margins)).mean().item()
    assert series(metrics, "validation/val_loss")[-1] == pytest.approx(expected, abs=1e-4)
    measured = series(metrics, "validation/rewards_margin_mean")[-1]
    assert measured == pytest.approx(0.1 * sum(margins) / len(margins), abs=1e-3)


def test_packed_sequences_train_as_padded_ones_do(run, tmp_path, model_folder):
    _, _, expected = run
    _, metrics = train_here(tmp_path / "run", model_folder, *packed(DPO, 256), *write_pairs(tmp_path))
    for name in ("train/loss", "train/rewards_margin_mean", "validation/val_loss", "train/grad_norm"):
        assert series(metrics, name) == pytest.approx(series(expected, name), abs=1e-4, rel=1e-4), name


@pytest.mark.parametrize(("algorithm", "write"), [("kto", write_labelled), ("orpo", write_pairs)])
def test_other_preferences_are_learnt_too(tmp_path, model_folder, algorithm, write):
    own = [f"algorithm={algorithm}", *OF_PAIRS, *write(tmp_path), "algorithm.max_num_steps=4"]
    _, metrics = train_here(tmp_path / "run", model_folder, *own)
    losses, names = series(metrics, "validation/val_loss"), set().union(*metrics)
    assert undocumented(names) == [] and not_logged(names, algorithm.upper()) == []
    if algorithm == "kto":
        margins = series(metrics, "validation/rewards_margin_mean")
        # Before the first step the policy is the reference: each loss is 1 - sigmoid(0).
        assert losses[0] == pytest.approx(0.5, abs=1e-4) and margins[0] == pytest.approx(0, abs=1e-4)
        assert losses[-1] < 0.49 and margins[-1] > 0.05
    else:
        assert losses[-1] < losses[0] and series(metrics, "validation/accuracy")[-1] > 0.5
        assert not any("logprobs" in name for name in names), "no pass of a reference"
