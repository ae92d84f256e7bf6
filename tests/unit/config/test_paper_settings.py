"""The files of configs/algorithm/ that set GRPO's keys as a paper has them."""

import pytest

from nemo_rl_lite.config.algorithms import ALGORITHMS
from nemo_rl_lite.config.keys import groups
from nemo_rl_lite.validation.compose import compose_config

# What each is known for.
SETTINGS = {
    "cispo": {"loss_fn.policy_loss": "cispo", "loss_fn.ratio_clip_min": 1.0, "loss_fn.token_level_loss": True},
    "dapo": {"use_dynamic_sampling": True, "loss_fn.ratio_clip_max": 0.28, "loss_fn.token_level_loss": True},
    "drgrpo": {"normalize_rewards": False, "loss_fn.token_level_loss": "constant"},
    "gspo": {"loss_fn.sequence_level_importance_ratios": True, "loss_fn.ratio_clip_max": 4e-4},
    "reinforce_pp": {"normalize_rewards": "advantages", "loss_fn.reference_policy_kl_type": "k2"},
    "rloo": {
        "use_leave_one_out_baseline": True,
        "loss_fn.policy_loss": "reinforce",
        "loss_fn.constant_length": 1,
        "normalize_rewards": False,
    },
    "sapo": {"loss_fn.policy_loss": "sapo", "loss_fn.token_level_loss": False},
}


def test_every_file_over_another_is_here():
    assert sorted([*SETTINGS, *ALGORITHMS]) == groups()["algorithm"]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_paper_is_a_setting_of_grpo(name):
    options = compose_config([f"algorithm={name}"]).algorithm
    assert options.name == "grpo"
    for key, value in SETTINGS[name].items():
        found = options
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value and type(found) is type(value), key
    assert (options.loss_fn.reference_policy_kl_penalty > 0) == (name == "reinforce_pp")


def test_the_constant_length_is_the_longest_response():
    config = compose_config(["algorithm=drgrpo", "generation.max_new_tokens=9"])
    assert config.algorithm.loss_fn.constant_length == 9
