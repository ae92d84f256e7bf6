"""Qwen3's attention uses vLLM's fused kernel where it computes what vLLM's layers do."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm import _custom_ops
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from nemo_rl_lite.compat.vllm_qk_norm import can_fuse, fused


class Scaled(RotaryEmbedding):
    """Computes its own embedding."""

    def forward_cuda(self, *given):
        raise NotImplementedError


def layer(rotary=RotaryEmbedding, flashinfer=False, rotary_dim=64, size=64, dtype=torch.bfloat16, variance=None):
    embedding = object.__new__(rotary)
    torch.nn.Module.__init__(embedding)
    embedding.use_flashinfer, embedding.rotary_dim, embedding.is_neox_style = flashinfer, rotary_dim, True
    embedding._match_cos_sin_cache_dtype = lambda states: "cache"
    norm = SimpleNamespace(weight=torch.ones(size, dtype=dtype), variance_epsilon=1e-6, variance_size_override=variance)
    return SimpleNamespace(
        rotary_emb=embedding,
        q_norm=norm,
        k_norm=norm,
        num_heads=2,
        num_kv_heads=1,
        head_dim=size,
        q_size=2 * size,
        kv_size=size,
        qkv_proj=lambda states: (states.clone(), None),
        attn=lambda query, key, value: torch.cat([query, key, value], -1),
        o_proj=lambda output: (output, None),
    )


class Other(torch.nn.Module):
    """Has no method for a GPU."""


OTHERS = [
    {"rotary": Scaled},
    {"rotary": Other},
    {"flashinfer": True},
    {"rotary_dim": 32},
    {"size": 80, "rotary_dim": 80},
    {"dtype": torch.float32},
    {"variance": 32},
]


def test_the_kernel_fits_plain_layers():
    assert can_fuse(layer()) and can_fuse(layer(size=128, rotary_dim=128, dtype=torch.float16))


@pytest.mark.parametrize("changes", OTHERS)
def test_other_layers_keep_their_kernels(changes):
    assert not can_fuse(layer(**changes))
    forward = fused(lambda self, positions, states: "theirs")
    assert forward(layer(**changes), torch.arange(3), torch.zeros(3, 256)) == "theirs"


def test_engines_with_batch_invariance_keep_their_kernels(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not can_fuse(layer())


def test_positions_with_several_parts_keep_their_kernels():
    forward = fused(lambda self, positions, states: "theirs")
    assert forward(layer(), torch.zeros(3, 3, dtype=torch.long), torch.zeros(3, 256)) == "theirs"


def test_the_kernel_changes_the_projection_in_place(monkeypatch):
    calls = []

    def add(states, *given):
        calls.append(given)
        states[:, :192] += 1

    monkeypatch.setattr(_custom_ops, "fused_qk_norm_rope", add)
    forward, states, positions = fused(lambda *given: "theirs"), torch.randn(3, 256), torch.arange(3)
    output = forward(layer(), positions, states)
    torch.testing.assert_close(output[:, :192], states[:, :192] + 1)
    torch.testing.assert_close(output[:, 192:], states[:, 192:])
    heads, key_heads, value_heads, size, epsilon, query_weight, _, cache, is_neox, given_positions = calls[0]
    assert (heads, key_heads, value_heads, size, epsilon) == (2, 1, 1, 64, 1e-6)
    assert query_weight.shape == (64,) and cache == "cache" and is_neox and given_positions is positions
