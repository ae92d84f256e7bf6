"""Low-rank adapters, whole runs in this process, for all three algorithms."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_lite.data.tokenizer import ChatTokenizer
from tests.functional.here import train_here
from tests.functional.supervised import DPO, LORA, SFT, Scorer, read_rows, series, write_data, write_pairs

pytestmark = pytest.mark.functional


def test_the_loss_falls_and_the_exported_model_has_it(tmp_path, model_folder):
    folder = tmp_path / "run"
    _, metrics = train_here(folder, model_folder, *SFT, *write_data(tmp_path), *LORA)
    held_out, rows = series(metrics, "validation/val_loss"), read_rows(tmp_path / "validation.jsonl")
    assert held_out[-1] < held_out[0] - 0.3
    assert held_out == pytest.approx([Scorer(path).loss(rows) for path in (model_folder, folder / "hf")], abs=1e-4)
    changed_by_a_low_rank(folder, model_folder)
    adapters_give_the_merged_weights(folder, model_folder)
    assert ChatTokenizer(folder / "adapter").end_tokens == ChatTokenizer(folder / "hf").end_tokens
    assert all((folder / one / "README.md").is_file() for one in ("hf", "adapter"))


def adapters_give_the_merged_weights(folder: Path, model_folder: Path) -> None:
    """Apply the adapters as PEFT does: by the names and numbers of adapter_config.json alone."""
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_folder)
    scale, targets = config["lora_alpha"] / config["r"], config["target_modules"]
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM") and not config["use_rslora"]
    before, after = load_file(model_folder / "model.safetensors"), load_file(folder / "hf" / "model.safetensors")
    file = folder / "adapter" / "adapter_model.safetensors"
    assert file.stat().st_mode == (folder / "adapter" / "adapter_config.json").stat().st_mode
    adapters = load_file(file)
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            first, second = (adapters.pop(f"base_model.model.{module}.lora_{one}.weight") for one in "AB")
            assert first.shape[0] == config["r"]
            weight = weight + scale * second @ first
        torch.testing.assert_close(after[name], weight, atol=1e-5, rtol=1e-5)
    assert not adapters


def changed_by_a_low_rank(folder: Path, model_folder: Path) -> None:
    """Of a run with LORA, linear layers alone."""
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
    _, metrics = train_here(tmp_path / "run", model_folder, *DPO, *write_pairs(tmp_path), *LORA)
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
