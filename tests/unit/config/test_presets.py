"""Defaults of algorithm files are those of their papers; the embedded example keeps its own."""

import pytest

from nemo_rl_lite.validation.compose import compose_config

HUB = "policy.model_name=Qwen/Qwen2.5-1.5B-Instruct"


def optimizer_of(*arguments):
    policy = compose_config(list(arguments)).policy
    own = policy.megatron_cfg.optimizer
    return own.lr, own.adam_beta2, own.weight_decay, policy.train_global_batch_size


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), (3e-4, 0.95, 0.0, 128)),
        (("algorithm=rloo",), (3e-4, 0.95, 0.0, 512)),
        ((HUB,), (1e-6, 0.999, 0.01, 512)),
        ((HUB, "algorithm.num_prompts_per_step=16"), (1e-6, 0.999, 0.01, 128)),
        ((HUB, "algorithm=dapo"), (1e-6, 0.999, 0.01, 1024)),
        ((HUB, "algorithm=dpo"), (1e-6, 0.999, 0.01, 128)),
        ((HUB, "algorithm=sft"), (5e-6, 0.999, 0.01, 128)),
        ((HUB, "policy.megatron_cfg.peft.enabled=true"), (3e-4, 0.999, 0.01, 512)),
    ],
)
def test_the_optimizer_is_that_of_the_references(arguments, expected):
    assert optimizer_of(*arguments) == expected


@pytest.mark.parametrize(("tokens", "buffer"), [(20480, 4096), (512, 102), (3, 1)])
def test_dapo_has_its_soft_overlong_punishment(tokens, buffer):
    length = f"policy.max_total_sequence_length={2 * tokens}"
    options = compose_config(["algorithm=dapo", HUB, length, f"generation.max_new_tokens={tokens}"]).algorithm
    assert options.num_generations_per_prompt == 16
    assert options.reward_shaping.overlong_buffer_length == buffer
