"""The mismatch budget of a run."""

import pytest

from nemo_rl_lite.config.schema import GenerationConfig
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.generation.mismatch import MismatchBudget, within_budget
from nemo_rl_lite.validation.compose import compose_config

FAST = "++generation.vllm_kwargs.attention_backend=CPU_ATTN"


def given(budget: str = "1e-3", *overrides: str) -> GenerationConfig:
    return compose_config([f"generation.max_gen_kl={budget}", *overrides]).generation


def noted(budget: MismatchBudget, *nats: float) -> list[int]:
    """Note the mismatch of steps 1, 2 and so on; return the steps after which the settings changed."""
    changes = []
    for step, value in enumerate(nats, start=1):
        before = budget.settings
        budget.note(step, value)
        if budget.settings is not before:
            changes.append(step)
    return changes


@pytest.mark.parametrize(
    ("nats", "changes"),
    [
        ((9e-4,) * 9, []),
        ((2e-3, 2e-3, 1e-3, 2e-3, 2e-3), []),
        ((1e-4, 2e-3, 2e-3, 2e-3), [4]),
        ((float("nan"),) * 3, [3]),
        ((2e-3,) * 9, [3]),
    ],
)
def test_three_steps_in_a_row_above_the_budget_change_the_settings(tmp_path, nats, changes):
    settings = given("1e-3", FAST, "++generation.vllm_kwargs.block_size=32")
    budget = MismatchBudget(settings, tmp_path, lambda line: None)
    assert noted(budget, *nats) == changes
    fast = {} if changes else {"attention_backend": "CPU_ATTN"}
    assert budget.settings.vllm_kwargs == fast | {"block_size": 32}


def test_defaults_are_no_options_to_give_up(tmp_path):
    said, settings = [], given("1e-3", "++generation.vllm_kwargs.kv_cache_dtype=auto")
    noted(MismatchBudget(settings, tmp_path, said.append), 2e-3, 2e-3, 2e-3)
    assert "no faster setting" in said[0]


def test_without_a_budget_nothing_changes(tmp_path):
    assert noted(MismatchBudget(given("null", FAST), tmp_path, lambda line: None), 9.0, 9.0, 9.0, 9.0) == []


def test_the_change_is_told_with_its_reason(tmp_path):
    said: list[str] = []
    noted(MismatchBudget(given("1e-3", FAST), tmp_path, said.append), *(2e-3,) * 9)
    restart, nothing_left = said
    for part in ("step 3", "0.002", "generation.max_gen_kl", "attention_backend=CPU_ATTN"):
        assert part in restart
    assert "step 6" in nothing_left and "use_importance_sampling_correction" in nothing_left


def test_a_resume_keeps_the_plain_settings_unless_their_reason_is_gone(tmp_path):
    settings = given("1e-3", FAST)
    noted(MismatchBudget(settings, tmp_path, lambda line: None), 2e-3, 2e-3, 2e-3)
    assert within_budget(settings, tmp_path).vllm_kwargs == {}
    assert MismatchBudget(settings, tmp_path, lambda line: None).settings.vllm_kwargs == {}
    larger = given("5e-3", FAST)
    other = given("1e-3", "++generation.vllm_kwargs.attention_backend=FLASH_ATTN")
    for now in (larger, other, given("null", FAST)):
        assert within_budget(now, tmp_path) == now
    assert within_budget(settings, tmp_path / "another-run") == settings


def test_engines_that_hold_the_weights_of_the_policy_cannot_fall_back():
    gpu = ["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "generation.colocated.sleep=false"]
    lora = ["policy.megatron_cfg.peft.enabled=true", "generation.vllm_cfg.lora=adapters"]
    cache = "++generation.vllm_kwargs.kv_cache_dtype=fp8"
    compose_config([*gpu, *lora, "generation.max_gen_kl=1e-3"])
    compose_config([*gpu, *lora, "generation.max_gen_kl=1e-3", cache, "refit.cuda_ipc=false"])
    with pytest.raises(ConfigError, match=r"generation\.max_gen_kl(.|\n)*kv_cache_dtype(.|\n)*refit\.cuda_ipc=false"):
        compose_config([*gpu, *lora, "generation.max_gen_kl=1e-3", cache])
