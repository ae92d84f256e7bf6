"""Attention and samples of a decoding step by the launcher's kernels, and repeated batches."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.config.engines import ENGINES
from nemo_rl_lite.validation.compose import compose_config
from tests.decode_kernel_cases import SMALL, Batch, check_attention, check_distribution, check_samples
from tests.functional.conftest import PYTHONPATH
from tests.functional.ranks import run_script
from tests.gpu.test_run import SMALL as RUN

LARGE = (
    Batch(512, 600, 16, 8, 128),
    Batch(256, 3000, 32, 8, 128, most=32768),
    Batch(3, 9000, 9, 3, 64, most=9000),
    Batch(20, 1000, 16, 2, 256, 32, 4096),
    Batch(130, 500, 64, 8, 64),
)


@pytest.mark.gpu
@pytest.mark.parametrize("heads_first", [False, True])
def test_attention_is_what_torch_computes(heads_first):
    torch.manual_seed(1)
    for batch in (*SMALL, *LARGE):
        check_attention(batch, "cuda", torch.bfloat16, heads_first)


@pytest.mark.gpu
def test_samples_have_the_distribution_of_the_logits():
    torch.manual_seed(1)
    for vocabulary in (50, 4096, 151_936):
        for dtype in (torch.bfloat16, torch.float32):
            check_samples(vocabulary, "cuda", dtype)
    check_distribution(30_000, "cuda")


@pytest.mark.gpu
def test_repeated_batches_give_the_tokens_of_prepared_ones(gpu_model, tmp_path):
    own = ENGINES["vllm"].environment(compose_config([*RUN, "cluster.gpus_per_node=1"]).generation, True)
    environ = dict(os.environ) | own | {"PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"}
    run_script(Path(__file__).with_name("repeats_process.py"), [gpu_model], environ, tmp_path / "log")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(16, 8, 128), (6, 2, 64)])
def test_queries_and_keys_are_those_of_vllms_layers(heads, key_heads, size):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.models.qwen3 import Qwen3Attention

    from nemo_rl_lite.compat.vllm_qk_norm import _FUSES, fused

    torch.manual_seed(1)
    with set_current_vllm_config(VllmConfig()), torch.device("cuda"):
        norms = [RMSNorm(size, dtype=torch.bfloat16) for _ in range(2)]
        rotary = get_rope(size, 4096, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    for norm in norms:
        norm.weight.data = 1 + torch.rand_like(norm.weight)
    seen: list[tuple[torch.Tensor, ...]] = []
    layer = SimpleNamespace(
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=size,
        q_size=heads * size,
        kv_size=key_heads * size,
        q_norm=norms[0],
        k_norm=norms[1],
        rotary_emb=rotary.to("cuda"),
        qkv_proj=lambda states: (states.clone(), None),
        attn=lambda *given: seen.append(given) or given[0],
        o_proj=lambda output: (output, None),
    )
    states = torch.randn(300, (heads + 2 * key_heads) * size, dtype=torch.bfloat16, device="cuda")
    positions = torch.randint(4096, (300,), device="cuda")
    forward = Qwen3Attention.forward
    fused(forward)(layer, positions, states)
    assert getattr(layer, _FUSES)
    setattr(layer, _FUSES, False)
    fused(forward)(layer, positions, states)
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.04, rtol=0.02)
    torch.testing.assert_close(seen[0][2], seen[1][2], atol=0, rtol=0)
