"""A run above its mismatch budget, with real Ray and vLLM."""

import pytest

from tests.functional.conftest import train
from tests.functional.here import train_here
from tests.functional.test_resume import metrics_of

pytestmark = pytest.mark.functional

TASK = [
    *("algorithm.num_prompts_per_step=8", "policy.train_global_batch_size=64", "algorithm.max_val_samples=20"),
    *("checkpoint.save_period=4", "++generation.vllm_kwargs.attention_backend=CPU_ATTN"),
]


def test_engines_above_the_budget_restart_without_an_effect_on_training(tmp_path, model_folder):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train_here(whole, model_folder, *TASK, "algorithm.max_num_steps=5", elsewhere=["generation"])
    budget = "generation.max_gen_kl=1e-20"
    output, metrics = train(halves, model_folder, *TASK, budget, "algorithm.max_num_steps=4")
    assert "the engines restart without attention_backend=CPU_ATTN" in output
    assert [line["step"] for line in metrics if "refit/fell_back" in line] == [3]
    output, _ = train_here(halves, model_folder, *TASK, budget, "algorithm.max_num_steps=5", elsewhere=["generation"])
    assert "resuming after step 4" in output and "with plain settings" in output
    # CPUs have this attention kernel only, so that plain engines sample the same.
    expected, found = metrics_of(whole), metrics_of(halves)
    assert expected and {key: found[key] for key in expected} == expected
