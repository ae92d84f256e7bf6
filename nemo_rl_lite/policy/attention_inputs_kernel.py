"""Triton kernels that make queries, keys and values of an attention layer's projection, and their gradients.

Import this module only on machines with a GPU. Shapes: N tokens, G groups of heads, P query heads per group, d numbers
per head. A token's projection has for each group P queries, a key and a value.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Numbers of half a head that a program has at a time, for a block of tokens.
_TILE = 1024
# Programs of the backward pass. Each adds the gradients of its tokens to its own sums.
_PROGRAMS = 1024


@triton.jit
def _make(source, first_weight, second_weight, cos, sin, target, inside, eps, NORMED: tl.constexpr, HALF: tl.constexpr):
    """Normalize and rotate a head of each token of a block."""
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        # Rounded as the result of a separate norm.
        first = (first * scale * first_weight).to(source.dtype.element_ty).to(tl.float32)
        second = (second * scale * second_weight).to(source.dtype.element_ty).to(tl.float32)
    tl.store(target, (first * cos - second * sin).to(target.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(target.dtype.element_ty), mask=inside)


@triton.jit
def _differentiate(
    gradient,
    source,
    first_weight,
    second_weight,
    cos,
    sin,
    target,
    inside,
    eps,
    NORMED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Store the gradient of a head of each token of a block; return those of its norm's weights, in two halves."""
    first_turned = tl.load(gradient, mask=inside, other=0.0).to(tl.float32)
    second_turned = tl.load(gradient + HALF, mask=inside, other=0.0).to(tl.float32)
    first = first_turned * cos + second_turned * sin
    second = second_turned * cos - first_turned * sin
    first_of_weight, second_of_weight = first, second
    if NORMED:
        first = first.to(gradient.dtype.element_ty).to(tl.float32)
        second = second.to(gradient.dtype.element_ty).to(tl.float32)
        first_source = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second_source = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        squares = tl.sum(first_source * first_source, axis=1) + tl.sum(second_source * second_source, axis=1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        first_source *= scale
        second_source *= scale
        first_of_weight, second_of_weight = first * first_source, second * second_source
        first *= first_weight
        second *= second_weight
        common = (tl.sum(first * first_source, axis=1) + tl.sum(second * second_source, axis=1)) / (2 * HALF)
        first = (first - first_source * common[:, None]) * scale
        second = (second - second_source * common[:, None]) * scale
    tl.store(target, first.to(target.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(target.dtype.element_ty), mask=inside)
    return first_of_weight, second_of_weight


@triton.jit
def _copy(source, target, inside, HALF: tl.constexpr):
    tl.store(target, tl.load(source, mask=inside), mask=inside)
    tl.store(target + HALF, tl.load(source + HALF, mask=inside), mask=inside)


@triton.jit
def _separate(
    projected,
    query_weight,
    key_weight,
    cosines,
    sines,
    query,
    key,
    value,
    tokens,
    eps,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make queries, keys and values of a block of tokens."""
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]).to(tl.int64)
    place, inside = tl.arange(0, HALF)[None, :], token < tokens
    cos = tl.load(cosines + token * HALF + place, mask=inside, other=0.0)
    sin = tl.load(sines + token * HALF + place, mask=inside, other=0.0)
    of_query, more_of_query, of_key, more_of_key = cos, cos, cos, cos
    if NORMED:
        of_query = tl.load(query_weight + place).to(tl.float32)
        more_of_query = tl.load(query_weight + HALF + place).to(tl.float32)
        of_key = tl.load(key_weight + place).to(tl.float32)
        more_of_key = tl.load(key_weight + HALF + place).to(tl.float32)
    for group in range(GROUPS):
        source = projected + (token * GROUPS + group) * (PER_GROUP + 2) * 2 * HALF + place
        target = query + (token * GROUPS + group) * PER_GROUP * 2 * HALF + place
        for head in range(PER_GROUP):
            at = head * 2 * HALF
            _make(source + at, of_query, more_of_query, cos, sin, target + at, inside, eps, NORMED, HALF)
        source += PER_GROUP * 2 * HALF
        own = (token * GROUPS + group) * 2 * HALF + place
        _make(source, of_key, more_of_key, cos, sin, key + own, inside, eps, NORMED, HALF)
        _copy(source + 2 * HALF, value + own, inside, HALF)


@triton.jit
def _separate_backward(
    projected,
    query_weight,
    key_weight,
    cosines,
    sines,
    of_query,
    of_key,
    of_value,
    of_projected,
    of_weights,
    tokens,
    eps,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make the projection's gradient of some blocks of tokens, and the sums of the weights' gradients over them."""
    place = tl.arange(0, HALF)[None, :]
    first_query, second_query, first_key, second_key = 0.0, 0.0, 0.0, 0.0
    if NORMED:
        first_query = tl.load(query_weight + place).to(tl.float32)
        second_query = tl.load(query_weight + HALF + place).to(tl.float32)
        first_key = tl.load(key_weight + place).to(tl.float32)
        second_key = tl.load(key_weight + HALF + place).to(tl.float32)
    query_sum = tl.zeros([BLOCK, HALF], tl.float32)
    more_query_sum = tl.zeros([BLOCK, HALF], tl.float32)
    key_sum = tl.zeros([BLOCK, HALF], tl.float32)
    more_key_sum = tl.zeros([BLOCK, HALF], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens, BLOCK), tl.num_programs(0)):
        token = (block * BLOCK + tl.arange(0, BLOCK)[:, None]).to(tl.int64)
        inside = token < tokens
        cos = tl.load(cosines + token * HALF + place, mask=inside, other=0.0)
        sin = tl.load(sines + token * HALF + place, mask=inside, other=0.0)
        for group in range(GROUPS):
            at_group = (token * GROUPS + group) * (PER_GROUP + 2) * 2 * HALF + place
            gradient = of_query + (token * GROUPS + group) * PER_GROUP * 2 * HALF + place
            for head in range(PER_GROUP):
                at = at_group + head * 2 * HALF
                first, second = _differentiate(
                    gradient + head * 2 * HALF,
                    projected + at,
                    first_query,
                    second_query,
                    cos,
                    sin,
                    of_projected + at,
                    inside,
                    eps,
                    NORMED,
                    HALF,
                )
                query_sum += first
                more_query_sum += second
            at, own = at_group + PER_GROUP * 2 * HALF, (token * GROUPS + group) * 2 * HALF + place
            first, second = _differentiate(
                of_key + own,
                projected + at,
                first_key,
                second_key,
                cos,
                sin,
                of_projected + at,
                inside,
                eps,
                NORMED,
                HALF,
            )
            key_sum += first
            more_key_sum += second
            _copy(of_value + own, of_projected + at + 2 * HALF, inside, HALF)
    if NORMED:
        at = of_weights + tl.program_id(0) * 4 * HALF + tl.arange(0, HALF)
        tl.store(at, tl.sum(query_sum, axis=0))
        tl.store(at + HALF, tl.sum(more_query_sum, axis=0))
        tl.store(at + 2 * HALF, tl.sum(key_sum, axis=0))
        tl.store(at + 3 * HALF, tl.sum(more_key_sum, axis=0))


@dataclass(frozen=True)
class Heads:
    """Heads of an attention layer on this rank."""

    groups: int
    """Keys and values per token."""
    per_group: int
    """Queries of each key."""
    size: int
    """Numbers per head, a power of 2."""
    eps: float = 0.0
    """Epsilon of the norms of queries and keys, if there are any."""

    def launch(self, kernel: Any, programs: int, *tensors: Tensor, normed: bool) -> None:
        tokens, half = len(tensors[0]), self.size // 2
        sizes = {"GROUPS": self.groups, "PER_GROUP": self.per_group, "HALF": half, "NORMED": normed}
        kernel[(programs,)](*tensors, tokens, self.eps, **sizes, BLOCK=_block(half))


def separate(
    projected: Tensor, weights: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [N, G P, d], keys and values [N, G, d] of a contiguous `projected`, [N, G (P + 2) d].

    Queries and keys are normalized with `weights`, each [d], and rotated by `cos` and `sin`, float32 [N, d / 2]. A
    head's first half is rotated with its second half.
    """
    count, width = len(projected), heads.groups * heads.size
    query, key, value = (projected.new_empty(count, width * each) for each in (heads.per_group, 1, 1))
    programs = -(-count // _block(heads.size // 2))
    own = weights or (cos, cos)  # not read
    heads.launch(_separate, programs, projected, *own, cos, sin, query, key, value, normed=weights is not None)
    own_size = (count, -1, heads.size)
    return query.view(own_size), key.view(own_size), value.view(own_size)


def separate_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    projected: Tensor | None,
    weights: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `separate`'s projection and of both weights, float32 [2, d].

    `gradients`: of queries, keys and values. Without `weights`, `projected` is not read.
    """
    own = [one.contiguous() for one in gradients]
    count = len(own[0])
    of_projected = own[0].new_empty(count, heads.groups * (heads.per_group + 2) * heads.size)
    programs = min(-(-count // _block(heads.size // 2)), _PROGRAMS)
    sums = cos.new_empty(programs, 2, heads.size)
    given = (of_projected, cos, cos) if projected is None or weights is None else (projected, *weights)
    heads.launch(_separate_backward, programs, *given, cos, sin, *own, of_projected, sums, normed=weights is not None)
    return of_projected, None if weights is None else sums.sum(0)


def _block(half: int) -> int:
    """Return the tokens that a program has at a time."""
    return max(1, _TILE // half)
