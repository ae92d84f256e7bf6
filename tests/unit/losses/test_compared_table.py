"""The table in docs/algorithms.md of what is compared with what has every loss, and its tests are there."""

import re
import typing
from dataclasses import fields
from pathlib import Path

import pytest

from nemo_rl_lite.config.algorithms import ALGORITHMS
from nemo_rl_lite.config.sections.algorithm import DistillationLossConfig, DPOConfig, KTOConfig, LossConfig
from nemo_rl_lite.losses.grpo import POLICY_TERMS
from nemo_rl_lite.losses.preference import PREFERENCES
from tests.unit.pages import DOCS

TITLE = "## What the losses are checked against"
# Parts of a GRPO loss that are switched on by a key.
PARTS = ("token_level_loss", "use_kl_in_reward", "top_entropy_quantile", "positive_example_nll_weight")


def table() -> str:
    return (DOCS / "algorithms.md").read_text().split(TITLE)[1].split("\n## ")[0]


def choices(options: type, key: str) -> tuple[str, ...]:
    return typing.get_args({one.name: one.type for one in fields(options)}[key])


def test_the_registries_are_what_the_schema_allows():
    assert set(choices(LossConfig, "policy_loss")) == POLICY_TERMS.keys()
    assert set(choices(DPOConfig, "preference_loss")) == PREFERENCES.keys()


OF_OTHERS = (*choices(KTOConfig, "preference_loss"), *choices(DistillationLossConfig, "kl_type"))


@pytest.mark.parametrize("name", [*POLICY_TERMS, *PREFERENCES, *OF_OTHERS, *PARTS])
def test_every_term_is_in_the_table(name):
    assert re.search(rf"`(\w+=)?{name}(=\w+)?`", table()), f"a row for {name}, in docs/algorithms.md: {TITLE}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_in_the_table(name):
    row = rf"{name.upper()}|^\| {name}"
    assert re.search(row, table(), re.MULTILINE), f"a row for {name}, in docs/algorithms.md: {TITLE}"


def test_the_tests_of_the_table_are_there():
    named = re.findall(r"`(test_\w+\.py)`", table())
    assert len(named) >= 8
    assert [name for name in named if not Path(__file__).with_name(name).is_file()] == []
