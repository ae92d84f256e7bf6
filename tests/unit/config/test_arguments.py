"""Arguments of Python become overrides that Hydra reads as the same values."""

from pathlib import Path

import numpy as np
import pytest

from nemo_rl_lite.config.arguments import full_key, literal, overrides_of
from nemo_rl_lite.config.keys import parse_override
from nemo_rl_lite.errors import ConfigError


def path_of(key, value):
    return f"a file.py:{value.__name__}"


def score(response, answer): ...


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 7, -1, 1e-05, 0.25, "", "text", "null", "1", "a, b: {c} [d] = e", "it's", 'say "hi"'),
        *("ends in \\", r"\d+\'", "\\'", "\\\\", "two\nlines", "ünïcode", "~/x", "$HOME"),
        *([], ["a", "b's"], [1, None], {}, {"a": 1, "b.c": ["x"], "d": {"e": "f\\"}}),
    ],
    ids=repr,
)
def test_a_value_comes_back_as_it_was(value):
    override = parse_override(f"reward.kwargs={literal('reward.kwargs', value, path_of)}")
    assert override is not None and override.value() == value
    assert type(override.value()) is type(value)


def test_values_of_other_types_become_plain_ones():
    assert literal("a", np.float32(0.5), path_of) == "0.5" and literal("a", np.int64(3), path_of) == "3"
    assert literal("a", Path("b/c"), path_of) == "b/c" and literal("a", (1, 2), path_of) == "[1,2]"
    assert literal("a", [score], path_of) == "['a file.py:score']"


@pytest.mark.parametrize(
    "value", [float("nan"), object(), {"a b": 1}, np.zeros(2)], ids=lambda value: type(value).__name__
)
def test_what_no_override_can_hold_is_an_error_of_its_key(value):
    with pytest.raises(ConfigError) as error:
        literal("reward.kwargs", value, path_of)
    assert [one.key for one in error.value.violations] == ["reward.kwargs"]


@pytest.mark.parametrize(
    ("name", "algorithm", "key"),
    [
        ("max_num_steps", "grpo", "algorithm.max_num_steps"),
        ("lr", "sft", "policy.megatron_cfg.optimizer.lr"),
        ("optimizer.lr", "sft", "policy.megatron_cfg.optimizer.lr"),
        ("temperature", "grpo", "generation.temperature"),
        ("max_num_epochs", "dpo", "algorithm.max_num_epochs"),
        ("policy.precision", "grpo", "policy.precision"),
        ("reward.kwargs.anything", "grpo", "reward.kwargs.anything"),
        # The command answers what is unknown, and what is another algorithm's.
        ("learning_rate", "grpo", "learning_rate"),
        ("early_stop_patience", "grpo", "early_stop_patience"),
    ],
)
def test_a_short_name_is_the_end_of_one_key(name, algorithm, key):
    assert full_key(name, algorithm) == key


def test_a_short_name_of_several_keys_names_them():
    with pytest.raises(ConfigError, match=r"concurrency\n.*several keys end with this name\n.*reward.concurrency"):
        full_key("concurrency", "grpo")


def test_groups_sections_and_code():
    arguments = {
        "generation": "transformers",
        "policy": {"precision": "bfloat16", "megatron_cfg": {"optimizer": {"lr": 1e-4}}},
        "reward": score,
        "agent": "my.py:play",
        "environment": {"name": score, "kwargs": {"tools": ["x"]}},
    }
    assert list(overrides_of(arguments, "grpo", path_of)) == [
        "generation=transformers",
        "policy.precision=bfloat16",
        "policy.megatron_cfg.optimizer.lr=0.0001",
        "reward.name='a file.py:score'",
        "agent.name=my.py:play",
        "environment.name='a file.py:score'",
        "environment.kwargs={tools:[x]}",
    ]
