"""Direct preference optimisation, whole runs, with real Megatron in this process."""

import json
from pathlib import Path

import pytest
import torch

from tests.functional.here import train_here
from tests.functional.test_sft import series
from tests.metric_names import not_logged, undocumented

pytestmark = pytest.mark.functional

SMALL = [
    "algorithm=dpo",
    "algorithm.max_num_steps=6",
    "algorithm.max_num_epochs=2",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=4",
    "policy.megatron_cfg.optimizer.lr=1e-3",
]


def write_pairs(folder: Path) -> list[str]:
    """Sums, right and off by one, of different lengths; 28 of 35 are trained on."""
    rows = [
        {"prompt": f"{a}+{b}", "chosen": f"{a} + {b} = {a + b}", "rejected": str(a + b + 1)}
        for a in range(7)
        for b in range(5)
    ]
    for name, part in (("train", [row for at, row in enumerate(rows) if at % 5]), ("validation", rows[::5])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return ["data=file", *(f"data.{name}_path={folder / name}.jsonl" for name in ("train", "validation"))]


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("dpo")
    return folder / "run", *train_here(folder / "run", model_folder, *SMALL, *write_pairs(folder), plots=True)


def test_the_policy_comes_to_prefer_what_was_chosen(run):
    _, output, metrics = run
    losses, accuracies = series(metrics, "validation/val_loss"), series(metrics, "validation/accuracy")
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and accuracies[0] == 0.5
    assert losses[-1] < 0.6 and accuracies[-1] > 0.9
    assert series(metrics, "train/loss")[0] == pytest.approx(0.6931, abs=1e-4)
    assert series(metrics, "train/rewards_margin_mean")[-1] > 0.1
    assert "preference accuracy" not in output and "held-out accuracy" in output


def test_every_metric_is_documented_and_logged(run):
    _, _, metrics = run
    names = set().union(*metrics)
    assert undocumented(names) == [] and not_logged(names, "all", "DPO") == []


def test_losses_and_margins_are_those_transformers_computes(run, model_folder):
    """On the held-out pairs, from the exported weights and the starting ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _, metrics = run
    rows = [json.loads(line) for line in (folder.parent / "validation.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)

    def score(model, prompt: str, response: str) -> float:
        begin = tokenizer(f"<bos>{prompt}=")["input_ids"]
        tokens = torch.tensor([begin + tokenizer(f"{response}<eos>")["input_ids"]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, tokens[0, 1:, None])[len(begin) - 1 :].sum().item()

    start, end = (AutoModelForCausalLM.from_pretrained(path) for path in (model_folder, folder / "hf"))
    margins = [
        score(end, row["prompt"], row["chosen"])
        - score(start, row["prompt"], row["chosen"])
        - score(end, row["prompt"], row["rejected"])
        + score(start, row["prompt"], row["rejected"])
        for row in rows
    ]
    expected = -torch.nn.functional.logsigmoid(0.1 * torch.tensor(margins)).mean().item()
    assert series(metrics, "validation/val_loss")[-1] == pytest.approx(expected, abs=1e-4)
    measured = series(metrics, "validation/rewards_margin_mean")[-1]
    assert measured == pytest.approx(0.1 * sum(margins) / len(margins), abs=1e-3)


def test_packed_sequences_train_as_padded_ones_do(run, tmp_path, model_folder):
    _, _, expected = run
    whole = [override for override in SMALL if "micro_batch_size" not in override]
    packed = ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=256"]
    _, metrics = train_here(tmp_path / "run", model_folder, *whole, *write_pairs(tmp_path), *packed)
    for name in ("train/loss", "train/rewards_margin_mean", "validation/val_loss", "train/grad_norm"):
        assert series(metrics, name) == pytest.approx(series(expected, name), abs=1e-4, rel=1e-4), name
