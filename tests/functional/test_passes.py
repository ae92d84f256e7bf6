"""Runs with and without a pass of its own for the policy's previous logprobs."""

import pytest
from torch import Tensor

from nemo_rl_lite.policy.megatron import linear_scores
from nemo_rl_lite.policy.megatron.slice_scores import Head
from tests.functional.here import train_here

pytestmark = pytest.mark.functional

KEY = "algorithm.loss_fn.force_on_policy_ratio"
SHORT = [
    *("generation=transformers", "algorithm.max_num_steps=2", "algorithm.val_period=0"),
    *("algorithm.num_prompts_per_step=8", "policy.train_global_batch_size=64", "policy.train_micro_batch_size=16"),
    *("policy.logprob_batch_size=16", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"),
    *("algorithm.val_at_start=false", "algorithm.val_at_end=false", "checkpoint.export_hf_at_end=false"),
]
PASS = "performance/policy_and_reference_logprobs_tokens_per_sec"


def trained(folder, model_folder, *overrides) -> dict[str, float]:
    """What the loss of the second step measured, and whether logprobs had a pass."""
    _, lines = train_here(folder, model_folder, *SHORT, *overrides)
    last = {name: value for line in lines if line["step"] == 2 for name, value in line.items()}
    return {name: value for name, value in last.items() if name.startswith("train/") or name == PASS}


@pytest.mark.parametrize(
    ("batch", "penalty"),
    [([], 0.0), ([], 0.001), (["policy.train_global_batch_size=32"], 0.0)],
    ids=["one optimizer step", "one with a reference", "two"],
)
def test_a_pass_that_repeats_changes_nothing(tmp_path, model_folder, batch, penalty):
    """Neither the loss and its gradient, nor the names of metrics, nor what is found of the engines' mismatch."""
    overrides = [*batch, f"algorithm.loss_fn.reference_policy_kl_penalty={penalty}"]
    repeated = trained(tmp_path / "repeated", model_folder, *overrides, f"{KEY}=false")
    found = trained(tmp_path / "saved", model_folder, *overrides)
    assert (PASS in found) is bool(batch or penalty) and PASS in repeated
    for measured in (found, repeated):
        measured.pop(PASS, None)
    assert found == pytest.approx(repeated, rel=1e-6, abs=1e-9)
    if not batch:
        assert found["train/probs_ratio_min"] == found["train/probs_ratio_max"] == 1


def test_kept_logits_change_nothing(tmp_path, model_folder, monkeypatch):
    """They are kept in training passes only, and what comes of them is what comes of logits that are computed twice."""
    kept, ways = [], linear_scores._ways

    def note(hidden: Tensor, head: Head) -> object:
        kept.append(head.keep)
        return ways(hidden, head)

    monkeypatch.setattr(linear_scores, "_ways", note)
    key = "policy.megatron_cfg.keep_logits"
    found, expected = (
        trained(tmp_path / name, model_folder, f"{KEY}=false", f"{key}={name}") for name in ("true", "false")
    )
    found.pop(PASS), expected.pop(PASS)
    assert found == expected
    # Two steps of four micro-batches, each with a forward and a backward pass. Passes for logprobs keep nothing.
    assert kept.count(True) == 2 * 4 * 2 < len(kept)
