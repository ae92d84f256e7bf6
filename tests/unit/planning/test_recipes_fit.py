"""Recipes for GPUs of 80 GB fit them, by the prediction: sizes are those of the models' own config.json."""

from pathlib import Path

import pytest

from nemo_rl_lite.models.shape import find_shape
from nemo_rl_lite.planning.automatic import resolve_auto
from nemo_rl_lite.planning.budget import budget
from nemo_rl_lite.validation.compose import compose_config

RECIPES = Path(__file__).parents[3] / "recipes"
GPU_BYTES = int(79.2 * 2**30)


NAMES = [
    path.stem
    for path in sorted(RECIPES.glob("*.yaml"))
    if "1n0g" not in path.stem and "smollm2" not in path.stem and "tiny" not in path.stem
]


def fullest(recipe: str, *overrides: str) -> int:
    """Predicted bytes of the recipe's fullest phase, contexts and graphs included, with `auto` settled as in a run."""
    config = compose_config([f"recipes={recipe}", *overrides])
    shape = find_shape(config.policy.model_name)
    planned = budget(resolve_auto(config, shape, GPU_BYTES).config, shape, GPU_BYTES)
    return planned.device[planned.peak_phase]


def test_there_are_such_recipes():
    assert len(NAMES) >= 6


@pytest.mark.parametrize("recipe", NAMES)
def test_every_phase_fits(recipe):
    assert fullest(recipe) <= GPU_BYTES


def test_the_largest_would_not_fit_without_offload():
    largest = "grpo-qwen3-30b-a3b-2n8g-ep8"
    share = "generation.vllm_cfg.gpu_memory_utilization=0.4"
    assert fullest(largest, "offload=none", share) > GPU_BYTES >= fullest(largest, share)
