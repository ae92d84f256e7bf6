"""Transformer Engine: token order when ranks exchange heads, the random state of attention, groups of FP8, experts.

With `cp_comm_type=a2a`, context-parallel ranks exchange parts of sequences for parts of heads, and back. Tokens arrive
in the order of ranks, but attention needs the order of sequences. Transformer Engine 2.12 computes both orders on the
host for every tensor of every layer. It waits for the device twice per chunk of a sequence. Here they are computed once
per row, on the device. Later releases have a kernel under other names.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from nemo_rl_lite.compat.versions import fits, installed, written_for

_RELEASE = "2.12"
written_for(__name__, "transformer-engine", _RELEASE)

log = logging.getLogger(__name__)

_CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"
# Two orders per row, for a few rows in flight.
_KEPT = 8


def leave_random_state(chunks: Sequence[Any]) -> None:
    """Stop attention without dropout from saving the random state.

    Transformer Engine copies it to the host and back in each forward pass, which a graph cannot capture.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "attention_dropout_ctx"):
            dropout = module.attention_dropout
            if (dropout.p if isinstance(dropout, nn.Dropout) else dropout) == 0:
                module.attention_dropout_ctx = nullcontext


def forget_groups() -> None:
    """Drop what outlives a model: process groups and maxima of FP8, and placeholders of fused gradients."""
    if installed("transformer-engine") is not None:
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # pyrefly: ignore[missing-import]
        from transformer_engine.pytorch.module import base  # pyrefly: ignore[missing-import]

        FP8GlobalStateManager.reset()
        getattr(base, "_dummy_wgrads", {}).clear()


def multiply_experts_at_once() -> None:
    """Multiply all experts of a layer in one CUTLASS kernel on Hopper GPUs, instead of one cuBLAS kernel each.

    The environment variable `NVTE_USE_CUTLASS_GROUPED_GEMM` wins. Gradients of weights stay with cuBLAS. Other
    releases are not changed.
    """
    if not fits("transformer-engine", _RELEASE) or os.environ.setdefault(_CUTLASS, "1") != "1":
        return
    from transformer_engine.pytorch.module import grouped_linear  # pyrefly: ignore[missing-import]

    gemm = grouped_linear.general_grouped_gemm
    if gemm.__module__ == __name__:
        return

    def multiply(*tensors: Any, m_splits: Sequence[int], **options: Any) -> Any:
        if any(m_splits):
            return gemm(*tensors, m_splits=m_splits, **options)
        # CUTLASS reads the first expert that has tokens (github.com/NVIDIA/TransformerEngine/pull/3037).
        os.environ[_CUTLASS] = "0"
        try:
            return gemm(*tensors, m_splits=m_splits, **options)
        finally:
            os.environ[_CUTLASS] = "1"

    grouped_linear.general_grouped_gemm = multiply


def exchange_heads_on_device(settings: Any) -> None:
    """Replace two functions of Transformer Engine if a model with these settings exchanges heads.

    Other releases are not patched.
    """
    if settings.context_parallel_size == 1 or settings.cp_comm_type != "a2a":
        return
    if not fits("transformer-engine", _RELEASE):
        own = installed("transformer-engine")
        log.info("Transformer Engine %s is not patched: the patch is for %s", own, _RELEASE)
        return
    # Only machines with GPUs have it.
    from transformer_engine.pytorch.attention.dot_product_attention import (  # pyrefly: ignore[missing-import]
        context_parallel,
    )

    for function in (reorder_seq_chunks_after_a2a_before_attn_thd, reorder_seq_chunks_before_a2a_after_attn_thd):
        setattr(context_parallel, function.__name__, function)


# Names and arguments are Transformer Engine's.
def reorder_seq_chunks_after_a2a_before_attn_thd(
    x: Tensor, cu_seqlens: Tensor, seq_chunk_ids: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """Reorder tokens [t, heads, d] from the order of ranks to that of sequences. `cu_seqlens` ends with t."""
    return x.index_select(seq_dim, places_of_ranks(cu_seqlens, cp_size, x.shape[seq_dim]))


def reorder_seq_chunks_before_a2a_after_attn_thd(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """Reorder tokens [t, heads, d] from the order of sequences to that of ranks."""
    return x.index_select(seq_dim, places_of_sequences(cu_seqlens, cp_size, x.shape[seq_dim]))


# The cache key is the tensor of boundaries, the same object in all layers. Each order is used on one stream only.
@lru_cache(maxsize=_KEPT)
def places_of_ranks(cu_seqlens: Tensor, ranks: int, tokens: int) -> Tensor:
    """Return the place in the order of ranks of each token in the order of sequences, [t]."""
    place = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, place, right=True) - 1
    begin, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
    chunk = (end - begin) // (2 * ranks)
    number = (place - begin) // chunk
    # A rank has a chunk from the front of each sequence, then one from its back.
    rank = torch.minimum(number, 2 * ranks - 1 - number)
    within = begin // ranks + (number >= ranks) * chunk + (place - begin) % chunk
    return rank * (tokens // ranks) + within


@lru_cache(maxsize=_KEPT)
def places_of_sequences(cu_seqlens: Tensor, ranks: int, tokens: int) -> Tensor:
    """Return the place in the order of sequences of each token in the order of ranks, [t]."""
    return places_of_ranks.__wrapped__(cu_seqlens, ranks, tokens).argsort()
