"""KTO and ORPO, whole runs, with real Megatron in this process."""

import json
from pathlib import Path

import pytest

from tests.functional.here import train_here
from tests.functional.test_dpo import write_pairs
from tests.functional.test_sft import series
from tests.metric_names import not_logged, undocumented

pytestmark = pytest.mark.functional

SHORT = [
    *("algorithm.max_num_steps=4", "algorithm.max_num_epochs=2", "policy.train_global_batch_size=8"),
    *("policy.train_micro_batch_size=4", "policy.megatron_cfg.optimizer.lr=1e-3"),
]


def write_labelled(folder: Path) -> list[str]:
    """The same sums as pairs have, right or off by one."""
    arguments = write_pairs(folder)
    for path in folder.glob("*.jsonl"):
        pairs = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [
            {"prompt": one["prompt"], "completion": one["chosen" if at % 2 else "rejected"], "label": bool(at % 2)}
            for at, one in enumerate(pairs)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return arguments


def test_kto_comes_to_prefer_what_is_desirable(tmp_path, model_folder):
    _, metrics = train_here(tmp_path / "run", model_folder, "algorithm=kto", *SHORT, *write_labelled(tmp_path))
    losses, margins = series(metrics, "validation/val_loss"), series(metrics, "validation/rewards_margin_mean")
    # Before the first step the policy is the reference: each loss is 1 - sigmoid(0).
    assert losses[0] == pytest.approx(0.5, abs=1e-4) and margins[0] == pytest.approx(0, abs=1e-4)
    assert losses[-1] < 0.49 and margins[-1] > 0.05
    names = set().union(*metrics)
    assert undocumented(names) == [] and not_logged(names, "KTO") == []


def test_orpo_comes_to_prefer_what_was_chosen_without_a_reference(tmp_path, model_folder):
    _, metrics = train_here(tmp_path / "run", model_folder, "algorithm=orpo", *SHORT, *write_pairs(tmp_path))
    losses, accuracies = series(metrics, "validation/val_loss"), series(metrics, "validation/accuracy")
    assert losses[-1] < losses[0] and accuracies[-1] > 0.5
    names = set().union(*metrics)
    assert undocumented(names) == [] and not_logged(names, "ORPO") == []
    assert not any("logprobs" in name for name in names), "no pass of a reference"
