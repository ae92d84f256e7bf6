"""Transformer Engine: the order of tokens where ranks exchange heads, and the random state of attention.

Before attention, context-parallel ranks (`cp_comm_type=a2a`) exchange parts of each sequence for parts of the heads.
Tokens arrive in the order of ranks, and attention needs the order of sequences; afterwards it is the reverse.
Transformer Engine 2.12 computes these orders for every tensor of every layer on the host, which waits for the device
twice for each chunk of each sequence. Here they are computed on the device, once per row. Later releases have a
kernel for it, under other names.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from nemo_rl_lite.compat.versions import fits, installed, written_for

_RELEASE = "2.12"
written_for("transformer-engine", _RELEASE, __name__)

log = logging.getLogger(__name__)

# A row has two orders, and a few rows may be in flight.
_KEPT = 8


def leave_random_state(chunks: Sequence[Any]) -> None:
    """Make attention without dropout leave the random state as it is.

    Transformer Engine would copy it to the host and back in each layer's forward pass, which takes time, and which a
    graph cannot record.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "attention_dropout_ctx"):
            dropout = module.attention_dropout
            if (dropout.p if isinstance(dropout, nn.Dropout) else dropout) == 0:
                module.attention_dropout_ctx = nullcontext


def exchange_heads_on_device(settings: Any) -> None:
    """Replace Transformer Engine's two functions, if a model with these settings of megatron-core exchanges heads.

    Another release keeps its own, which may be called in another way.
    """
    if settings.context_parallel_size == 1 or settings.cp_comm_type != "a2a":
        return
    if not fits("transformer-engine", _RELEASE):
        own = installed("transformer-engine")
        log.info("Transformer Engine %s orders exchanged heads itself: ours is for %s", own, _RELEASE)
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
    """Reorder tokens [t, heads, d] from rank order to sequence order.

    Args:
        cu_seqlens: where each sequence begins, and where the last one ends: at all t tokens.
    """
    return x.index_select(seq_dim, places_of_ranks(cu_seqlens, cp_size, x.shape[seq_dim]))


def reorder_seq_chunks_before_a2a_after_attn_thd(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """Reorder tokens [t, heads, d] from sequence order to rank order."""
    return x.index_select(seq_dim, places_of_sequences(cu_seqlens, cp_size, x.shape[seq_dim]))


# The key is the tensor of boundaries, which is the same object in all layers. Each order is used on one stream: the
# first on that of the exchange, the second on that of the computation.
@lru_cache(maxsize=_KEPT)
def places_of_ranks(cu_seqlens: Tensor, ranks: int, tokens: int) -> Tensor:
    """Return for each token in sequence order its place in rank order, [t]."""
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
    """Return for each token in rank order its place in sequence order, [t]."""
    return places_of_ranks.__wrapped__(cu_seqlens, ranks, tokens).argsort()
