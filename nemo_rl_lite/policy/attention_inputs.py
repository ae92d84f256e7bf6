"""Make queries, keys and values of packed rows in one kernel: split the projection, normalize, rotate.

megatron-core splits an attention layer's projection, copies queries, normalizes queries and keys, and rotates both.
These are eight kernels, and twelve in the backward pass, which read and write all of it each time. Results equal theirs
up to the rounding of sums.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.megatron import gathered_weight
from nemo_rl_lite.policy.shared_prompts import SharedKeys

# Attribute of a row with its rotation, which all layers use, also when they are recomputed.
_ROTATION = "nemo_rl_lite_rotation"
# Largest head.
_MOST = 256


def install(chunks: Sequence[Any]) -> int:
    """Let a model's attention layers use the kernels where they can. Return the number of these layers."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.utils import unwrap_model

    models: list[Any] = [unwrap_model(chunk) for chunk in chunks]
    rotating = [model for model in models if getattr(model, "position_embedding_type", None) == "rope"]
    layers = [module for model in rotating for module in model.modules() if type(module) is SelfAttention]
    suitable = list(filter(_is_plain, layers))
    for layer in suitable:
        _Inputs(layer)
    return len(suitable)


def _is_plain(attention: Any) -> bool:
    """Return whether a layer with plain rotary embeddings has heads and norms that the kernels know."""
    config, size = attention.config, attention.hidden_size_per_attention_head
    norms = attention.q_layernorm, attention.k_layernorm
    has_heads = config.num_query_groups >= attention.world_size and size.bit_count() == 1 and size <= _MOST
    # megatron-bridge's configuration has YaRN's factor.
    turns_otherwise = (
        config.rotary_interleaved or config.no_rope_freq or getattr(config, "yarn_rotary_scaling_factor", None)
    )
    is_other = turns_otherwise or config.attention_output_gate or config.test_mode
    return has_heads and not is_other and (_are_absent(norms) or all(map(_is_norm, norms)))


def _are_absent(norms: Sequence[Any]) -> bool:
    from megatron.core.transformer.identity_op import IdentityOp

    return all(norm is None or isinstance(norm, IdentityOp) for norm in norms)


def _is_norm(norm: Any) -> bool:
    """Return whether this is torch's or Transformer Engine's norm, with its usual weight."""
    return type(norm).__name__ == "RMSNorm" and not getattr(norm, "zero_centered_gamma", False)


class _Inputs:
    """Queries, keys and values of one layer."""

    def __init__(self, attention: Any):
        self._attention, self._separately = attention, attention.get_query_key_value_tensors
        norms = (attention.q_layernorm, attention.k_layernorm)
        self._norms = () if _are_absent(norms) else norms
        self._embedded: tuple[Any, Tensor, Tensor | None] | None = None
        attention.register_forward_pre_hook(self._take_embedding, with_kwargs=True)
        attention.get_query_key_value_tensors = self.tensors

    def _take_embedding(self, _: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Keep the rotary embedding of a packed row, so that megatron-core does not rotate it."""
        embedding, packed = options.get("rotary_pos_emb"), options.get("packed_seq_params")
        self._embedded = None
        if not isinstance(embedding, Tensor) or embedding.shape[-1] != self._attention.hidden_size_per_attention_head:
            return None
        if isinstance(packed, SharedKeys):
            # Its embedding is that of each token.
            self._embedded = packed, embedding, None
        elif packed is not None and packed.qkv_format == "thd":
            self._embedded = packed, embedding, packed.cu_seqlens_q
        else:
            return None
        return arguments, options | {"rotary_pos_emb": None}

    def tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Return queries [N, 1, heads, d], keys and values [N, 1, groups, d] of hidden states [N, 1, h]."""
        embedded, self._embedded = self._embedded, None
        if embedded is None:
            return self._separately(hidden_states, *arguments, **options)
        from nemo_rl_lite.policy.attention_inputs_kernel import Heads

        attention = self._attention
        projected, _ = attention.linear_qkv(hidden_states)
        weights = list(map(gathered_weight, self._norms))
        groups, size = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        per_group = attention.num_attention_heads_per_partition // groups
        heads = Heads(groups, per_group, size, self._norms[0].eps if self._norms else 0.0)
        row, embedding, boundaries = embedded
        if not hasattr(row, _ROTATION):
            setattr(row, _ROTATION, rotation(embedding, boundaries, len(projected)))
        turns = getattr(row, _ROTATION)
        made = _Separated.apply(projected.squeeze(1), *(weights or (None, None)), *turns, heads)
        return tuple(one.unsqueeze(1) for one in made)


def rotation(embedding: Tensor, boundaries: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each token's angles, float32 [N, d / 2].

    `embedding`: angles of each position, or of each token without `boundaries`, [.., 1, 1, d]. Its halves are equal.
    """
    angles = embedding.flatten(1)[:, : embedding.shape[-1] // 2].float()
    if boundaries is not None:
        place = torch.arange(tokens, device=boundaries.device)
        sequence = torch.searchsorted(boundaries, place, right=True) - 1
        angles = angles.index_select(0, place - boundaries[sequence])
    return angles.cos().contiguous(), angles.sin().contiguous()


class _Separated(torch.autograd.Function):
    """(projection [N, width], two weights [d] or None, cosines and sines [N, d / 2], `Heads`) -> queries, keys and
    values, [N, heads, d] each."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        of_query: Tensor | None,
        of_key: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        heads: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from nemo_rl_lite.policy.attention_inputs_kernel import separate

        weights = None if of_query is None or of_key is None else (of_query, of_key)
        # Only norms need the projection again.
        ctx.save_for_backward(None if weights is None else projected, of_query, of_key, cos, sin)
        ctx.heads = heads
        return separate(projected, weights, cos, sin, heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from nemo_rl_lite.policy.attention_inputs_kernel import separate_backward

        projected, of_query, of_key, cos, sin = ctx.saved_tensors
        weights = None if of_query is None else (of_query, of_key)
        of_projected, of_weights = separate_backward(gradients, projected, weights, cos, sin, ctx.heads)
        own = (None, None) if of_weights is None else of_weights.to(of_query.dtype).unbind()
        return of_projected, *own, None, None, None
