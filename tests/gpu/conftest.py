"""GPU tests: skipped where there are too few GPUs; `bash scripts/gpu_tests.sh` runs them."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = (marker.args[0] if marker.args else 1) if marker else 0
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), {there} here"))


@pytest.fixture(autouse=True)
def memory_for_other_processes() -> Iterator[None]:
    """What a test took in this process is given back; those that come after it may start processes of their own."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory) -> Path:
    """A small random Qwen3 that tensor parallel sizes 1, 2 and 4 divide, with the embedded task's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return saved_model(tmp_path_factory.mktemp("gpu-model"), Qwen3ForCausalLM, Qwen3Config, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def gpu_experts_model(tmp_path_factory) -> Path:
    """The same with eight experts in each layer, and an untied output layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder, experts = tmp_path_factory.mktemp("gpu-experts"), {"num_experts": 8, "num_experts_per_tok": 2}
    return saved_model(folder, Qwen3MoeForCausalLM, Qwen3MoeConfig, moe_intermediate_size=256, **experts)


def saved_model(folder: Path, model_class: Any, config_class: Any, **own: Any) -> Path:
    """Write a small random model with these fields of its configuration, and the embedded task's tokenizer."""
    from nemo_rl_lite.models.embedded import TOKENS, build_tokenizer

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = config_class(
        vocab_size=-(-len(TOKENS) // 128) * 128,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **{"num_key_value_heads": 4, "head_dim": 64} | own,
    )
    # Wide enough that logprobs are not all the same.
    config.initializer_range = 0.08
    model_class(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
