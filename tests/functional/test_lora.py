"""Low-rank adapters, whole runs in this process, for all three algorithms."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional import test_dpo, test_sft
from tests.functional.here import train_here
from tests.functional.test_sft import series

pytestmark = pytest.mark.functional

PEFT = "policy.megatron_cfg.peft"
LORA = [f"{PEFT}.enabled=true", f"{PEFT}.dim=4", f"{PEFT}.alpha=8", "policy.megatron_cfg.optimizer.lr=1e-2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("lora")
    data = test_sft.write_data(folder)
    return folder / "run", *train_here(folder / "run", model_folder, *test_sft.SMALL, *data, *LORA)


def test_the_loss_falls_and_the_exported_model_has_it(run, model_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _, metrics = run
    held_out = series(metrics, "validation/val_loss")
    assert held_out[-1] < held_out[0] - 0.3
    rows = [json.loads(line) for line in (folder.parent / "validation.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for model_path, measured in zip((model_folder, folder / "hf"), held_out, strict=True):
        model, total, count = AutoModelForCausalLM.from_pretrained(model_path), 0.0, 0
        for row in rows:
            prompt = tokenizer(f"<bos>{row['prompt']}=")["input_ids"]
            tokens = torch.tensor([prompt + tokenizer(f"{row['worked']}<eos>")["input_ids"]])
            with torch.no_grad():
                logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
            total -= logprobs[len(prompt) - 1 :].sum().item()
            count += tokens.shape[1] - len(prompt)
        assert measured == pytest.approx(total / count, abs=1e-4)


def test_only_linear_layers_have_changed_and_by_a_low_rank(run, model_folder):
    folder, _, _ = run
    changed_by_a_low_rank(folder, model_folder)


def changed_by_a_low_rank(folder: Path, model_folder: Path) -> None:
    """Of a run with LORA."""
    before, after = load_file(model_folder / "model.safetensors"), load_file(folder / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in after.items():
        change = (weight - before[name]).double()
        if "proj" not in name:
            assert not change.any(), name
            continue
        values = torch.linalg.svdvals(change)
        assert values[0] > 1e-3 and values[4] < 1e-5 * values[0], name


def test_the_reference_of_preferences_is_the_model_without_adapters(tmp_path, model_folder):
    _, metrics = train_here(tmp_path / "run", model_folder, *test_dpo.SMALL, *test_dpo.write_pairs(tmp_path), *LORA)
    losses = series(metrics, "validation/val_loss")
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < 0.6
    assert series(metrics, "train/loss")[0] == pytest.approx(0.6931, abs=1e-4)


def test_engines_get_merged_weights(tmp_path, model_folder):
    sizes = ["algorithm.num_prompts_per_step=4", "algorithm.num_generations_per_prompt=4", "algorithm.max_num_steps=2"]
    batch = ["policy.train_global_batch_size=16", "policy.train_micro_batch_size=8", "policy.logprob_batch_size=8"]
    more = ["generation=transformers", "algorithm.val_at_start=false"]
    kl = "algorithm.loss_fn.reference_policy_kl_penalty=0.1"
    _, metrics = train_here(tmp_path / "run", model_folder, *sizes, *batch, kl, *LORA, *more)
    assert max(series(metrics, "train/logprob_abs_diff_mean")) < 1e-4
    assert max(series(metrics, "refit/probe_logprob_diff")) < 1e-4
    penalties = series(metrics, "train/kl_penalty")
    assert penalties[0] == pytest.approx(0, abs=1e-7) and penalties[1] >= 0
