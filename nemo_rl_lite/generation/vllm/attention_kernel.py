"""Triton kernels for the attention of a decoding step: one new token per request, and a cache in blocks.

FlashAttention 3 computes 64 rows per key head, of which a decoding step needs the few query heads that share it. These
kernels compute 16, so that several programs fit on a multiprocessor and their reads overlap. Import this module only on
machines with a GPU. Shapes: R requests, H query heads, K key heads, d head size, B blocks of t tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Smallest number of rows in a matrix product.
_ROWS = 16
# Elements of the keys that a program reads at once.
_ELEMENTS = 8192
_WARPS, _STAGES = 2, 3
# Below this number of requests times key heads, caches are divided further, so that there is work for all
# multiprocessors.
_FEW = 1024
_LOG2_E = 1.4426950408889634


@triton.jit
def _parts(length, LEAST: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr):
    """Return the number of parts of a cache, and the tokens of a part."""
    parts = tl.minimum(tl.cdiv(length, LEAST), MOST)
    size = tl.cdiv(tl.cdiv(length, tl.maximum(parts, 1)), TILE) * TILE
    return tl.cdiv(length, tl.maximum(size, 1)), size


@triton.jit
def _attend(
    output,
    partial,
    totals,
    query,
    cache,
    table,
    lengths,
    scale,
    query_stride,
    block_stride,
    head_stride,
    token_stride,
    table_stride,
    output_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Attend to a part of a request's cache with the query heads of a key head."""
    head, row, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + row)
    parts, tokens = _parts(length, LEAST, MOST, TILE)
    if part >= tl.maximum(parts, 1):
        return
    own, size, place = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, TILE)
    heads = head * GROUP + own
    exists = (own < GROUP)[:, None]
    queries = tl.load(query + row * query_stride + heads[:, None] * SIZE + size[None, :], mask=exists, other=0.0)
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(part * tokens, tl.minimum((part + 1) * tokens, length), TILE):
        token = start + place
        inside = token < length
        block = tl.load(table + row * table_stride + token // BLOCK, mask=inside, other=0).to(tl.int64)
        at = cache + block * block_stride + head * head_stride + (token % BLOCK) * token_stride
        keys = tl.load(at[None, :] + size[:, None], mask=inside[None, :], other=0.0)
        values = tl.load(at[:, None] + SIZE + size[None, :], mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(queries, keys) * scale, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        powers = tl.exp2(scores - larger[:, None])
        shrunk = tl.exp2(largest - larger)
        total = total * shrunk + tl.sum(powers, 1)
        found = tl.dot(powers.to(values.dtype), values, found * shrunk[:, None])
        largest = larger
    # A padded row has no tokens.
    found = found / tl.where(total > 0, total, 1.0)[:, None]
    if MOST == 1 or parts <= 1:
        whole = output + row * output_stride + heads[:, None] * SIZE + size[None, :]
        tl.store(whole, found.to(output.dtype.element_ty), mask=exists)
    else:
        entry = (row * tl.num_programs(0) * GROUP + heads) * MOST + part
        tl.store(partial + entry[:, None] * SIZE + size[None, :], found, mask=exists)
        tl.store(totals + entry, largest + tl.log2(total), mask=own < GROUP)


@triton.jit
def _combine(
    output,
    partial,
    totals,
    lengths,
    output_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Combine the parts of a request's cache, for a query head."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts, _ = _parts(tl.load(lengths + row), LEAST, MOST, TILE)
    if parts <= 1:
        return
    part, size = tl.arange(0, PADDED), tl.arange(0, SIZE)
    exists = part < parts
    at = (row * tl.num_programs(0) + head) * MOST + part
    total = tl.load(totals + at, mask=exists, other=-float("inf"))
    weights = tl.exp2(total - tl.max(total, 0))
    found = tl.load(partial + at[:, None] * SIZE + size[None, :], mask=exists[:, None], other=0.0)
    mean = tl.sum(found * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(output + row * output_stride + head * SIZE + size, mean.to(output.dtype.element_ty))


def attend(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, scale: float, output: Tensor) -> None:
    """Write the attention of each request's newest token to all tokens of its cache.

    Args:
        query: (R, H, d) in the model's dtype, heads contiguous.
        cache: (B, K, t, 2d), of each token its keys and then its values, in the model's dtype.
        table: (R, n) int32, the blocks of each request's cache.
        lengths: (R) int32, tokens of each request's cache, the newest included. 0 fills the row with zeros.
        scale: factor of the products of queries and keys.
        output: (R, H, d), heads contiguous.
    """
    rows, heads, size = query.shape
    _, key_heads, block, _ = cache.shape
    most, least = (16, 256) if rows * key_heads < _FEW else (8, 2048)
    most = min(most, -(-table.shape[1] * block // least))
    partial, totals = output, lengths
    if most > 1:
        partial = torch.empty(rows, heads, most, size, dtype=torch.float32, device=query.device)
        totals = torch.empty(rows, heads, most, dtype=torch.float32, device=query.device)
    group, tile = heads // key_heads, max(16, _ELEMENTS // size)
    division = {"SIZE": size, "TILE": tile, "LEAST": least, "MOST": most}
    attend_to_part: Any = _attend[(key_heads, rows, most)]
    attend_to_part(
        *(output, partial, totals, query, cache, table, lengths, scale * _LOG2_E),
        *(query.stride(0), *cache.stride()[:3], table.stride(0), output.stride(0)),
        GROUP=group,
        ROWS=max(_ROWS, triton.next_power_of_2(group)),
        BLOCK=block,
        num_warps=_WARPS,
        num_stages=_STAGES,
        **division,
    )
    if most > 1:
        combine: Any = _combine[(heads, rows)]
        padded = triton.next_power_of_2(most)
        combine(output, partial, totals, lengths, output.stride(0), PADDED=padded, num_warps=1, **division)
