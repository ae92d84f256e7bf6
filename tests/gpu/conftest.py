"""GPU tests: skipped where there are too few GPUs; `bash scripts/gpu_tests.sh` runs them."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = (marker.args[0] if marker.args else 1) if marker else 0
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), {there} here"))


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory) -> Path:
    """A small random Qwen3 that tensor parallel sizes 1, 2 and 4 divide, with the embedded task's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from nemo_rl_lite.embedded.build import build_tokenizer
    from nemo_rl_lite.embedded.reverse_digits import TOKENS

    folder = tmp_path_factory.mktemp("gpu-model")
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=-(-len(TOKENS) // 128) * 128,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    # Wide enough that logprobs are not all the same.
    config.initializer_range = 0.08
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
