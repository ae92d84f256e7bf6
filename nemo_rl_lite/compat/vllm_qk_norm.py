"""Norms of queries and keys and their rotary embedding in one kernel, for Qwen3's attention.

vLLM has the kernel and uses it in compiled models. Without compilation it launches three kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.versions import written_for

written_for(__name__, "vllm", "0.26")

# Of the kernel.
_HEAD_SIZES = (64, 128, 256)
# Attribute of a layer: the result of `can_fuse`.
_FUSES = "nemo_rl_lite_fuses"


def fuse_norms() -> None:
    """Replace the attention's `forward` of Qwen3 and its experts. Each rank calls this."""
    from vllm.model_executor.models import qwen3, qwen3_moe

    kinds: tuple[Any, ...] = (qwen3.Qwen3Attention, qwen3_moe.Qwen3MoeAttention)
    for kind in kinds:
        kind.forward = fused(kind.forward)


def fused(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a `forward` that uses the kernel where it computes what `forward` does."""
    from vllm import _custom_ops

    def forward_fused(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or positions.dim() != 1:
            return forward(self, positions, hidden_states)
        fuses: bool | None = getattr(self, _FUSES, None)
        if fuses is None:
            fuses = can_fuse(self)
            setattr(self, _FUSES, fuses)
        if not fuses:
            return forward(self, positions, hidden_states)
        states, _ = self.qkv_proj(hidden_states)
        _custom_ops.fused_qk_norm_rope(
            states,
            self.num_heads,
            self.num_kv_heads,
            self.num_kv_heads,
            self.head_dim,
            self.q_norm.variance_epsilon,
            self.q_norm.weight,
            self.k_norm.weight,
            self.rotary_emb._match_cos_sin_cache_dtype(states),
            self.rotary_emb.is_neox_style,
            positions,
        )
        output, _ = self.o_proj(self.attn(*states.split([self.q_size, self.kv_size, self.kv_size], dim=-1)))
        return output

    return forward_fused


def can_fuse(layer: Any) -> bool:
    """Return whether the kernel fits a `Qwen3Attention`."""
    from vllm import envs
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotary, norms = layer.rotary_emb, (layer.q_norm, layer.k_norm)
    return (
        # Some embeddings have no such method.
        getattr(type(rotary), "forward_cuda", None) is RotaryEmbedding.forward_cuda
        and not envs.VLLM_BATCH_INVARIANT
        and not rotary.use_flashinfer
        and rotary.rotary_dim == layer.head_dim
        and layer.head_dim in _HEAD_SIZES
        and all(norm.weight.dtype in (torch.bfloat16, torch.float16) for norm in norms)
        and all(norm.variance_size_override is None for norm in norms)
    )
