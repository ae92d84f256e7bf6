"""Watched copies bring weights where vLLM's own loader brings them: fused projections, padded vocabulary, experts."""

from pathlib import Path

import pytest
import torch

from tests.functional.ranks import run_script

pytestmark = pytest.mark.functional

SIZES = {
    # Padded by vLLM to a multiple of 64.
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "llama": {"tie_word_embeddings": False},
}


def test_a_second_refit_without_the_loader_gives_what_the_loader_gives(engine_environment, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rl_lite.models.embedded import build_tokenizer

    folders = [(seed, kind, tmp_path / f"{kind}-{seed}") for kind in MODELS for seed in range(2)]
    for seed, kind, folder in folders:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **MODELS[kind])).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    script = Path(__file__).with_name("vllm_loader.py")
    run_script(script, [folder for _, _, folder in folders], engine_environment, tmp_path / "log")
