"""Recipes for GPUs of 80 GB fit them, by the prediction: sizes are those of the models' own config.json."""

from pathlib import Path

import pytest

from nemo_rl_lite.config.compose import compose_config
from nemo_rl_lite.config.model_shape import model_shape
from nemo_rl_lite.jobs.memory_plan import OVERHEAD
from nemo_rl_lite.offload.prediction import predict, totals

RECIPES = Path(__file__).parents[3] / "recipes"
GPU_BYTES = int(79.2 * 2**30)


def model(model_type: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: object) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"model_type": model_type, "vocab_size": 151936, "max_position_embeddings": 32768} | sizes | more


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS = {
    "qwen2.5-0.5b": model("qwen2", 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "qwen2.5-1.5b": model("qwen2", 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "qwen3-8b": model("qwen3", 4096, 12288, 36, 32, 8, head_dim=128),
    "llama3.1-8b": model("llama", 4096, 14336, 32, 32, 8, vocab_size=128256),
    "qwen3-30b-a3b": model("qwen3_moe", 2048, 6144, 48, 32, 4, head_dim=128, **EXPERTS),
}
NAMES = [path.stem for path in sorted(RECIPES.glob("*.yaml")) if any(name in path.stem for name in MODELS)]


def fullest(recipe: str, *overrides: str) -> int:
    """Predicted bytes of the recipe's fullest phase, contexts and graphs included."""
    shape = model_shape(next(config for name, config in MODELS.items() if name in recipe))
    prediction = predict(compose_config([f"recipes={recipe}", *overrides]), shape, GPU_BYTES)
    return max(phase.device for phase in totals(prediction).values()) + OVERHEAD


def test_there_are_such_recipes():
    assert len(NAMES) >= 6


@pytest.mark.parametrize("recipe", NAMES)
def test_every_phase_fits(recipe):
    assert fullest(recipe) <= GPU_BYTES


def test_the_largest_would_not_fit_without_offload():
    largest = "grpo-qwen3-30b-a3b-2n8g-ep8"
    share = "generation.vllm_cfg.gpu_memory_utilization=0.4"
    assert fullest(largest, "offload=none", share) > GPU_BYTES >= fullest(largest, share)
