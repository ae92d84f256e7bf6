"""Whole runs of a mixture of experts with vLLM: what the engine chose is what the policy computes with."""

import statistics
from pathlib import Path

import pytest

from nemo_rl_lite.compat.versions import since
from tests.functional.conftest import random_experts
from tests.functional.here import train_here

pytestmark = [
    pytest.mark.functional,
    pytest.mark.skipif(since("vllm", "0.31"), reason="from 0.31 on, vLLM records experts on GPUs only"),
]

# In bfloat16 engine and policy round differently, so that their routers sometimes disagree.
OVERRIDES = [
    *("policy.precision=bfloat16", "algorithm.max_num_steps=2", "algorithm.num_prompts_per_step=4"),
    *("policy.train_global_batch_size=32", "algorithm.val_at_start=false", "algorithm.val_at_end=false"),
    *("checkpoint.export_hf_at_end=false", "algorithm.loss_fn.reference_policy_kl_penalty=0.1"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small random Qwen3 with four layers of eight experts, two of them for each token."""
    return random_experts(tmp_path_factory.mktemp("experts"), num_hidden_layers=4, num_experts=8)


@pytest.fixture(scope="module")
def steps(model, tmp_path_factory) -> dict[str, list[dict]]:
    """The metrics of the steps, without replay and with it."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for value in ("false", "true"):
        own = [*OVERRIDES, f"policy.router_replay.enabled={value}"]
        _, metrics = train_here(folder / value, model, *own, elsewhere=["generation"])
        found[value] = [line for line in metrics if "train/loss" in line]
    return found


def test_replay_takes_most_of_the_mismatch_away(steps):
    def mismatch(value: str) -> float:
        return statistics.mean(line["train/gen_kl_error"] for line in steps[value])

    assert mismatch("true") < mismatch("false") / 4


def test_the_reference_takes_the_same_experts(steps):
    """Before the first optimizer step it is the policy."""
    assert steps["true"][0]["train/kl_penalty"] == 0
