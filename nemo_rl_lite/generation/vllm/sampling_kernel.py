"""Triton kernels that draw the next token of each request and compute its logprob.

They draw by the inverse of the distribution function, first a slice of the vocabulary and then a token in it. So they
read all logits once and need two random numbers per token, where the Gumbel method needs one per logit. Import this
module only on machines with a GPU. Shapes: N tokens, V vocabulary, S slices, R request states.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 4


@triton.jit
def _read(logits, stride, token, place, vocabulary):
    """Return logits as float32; -inf outside the vocabulary."""
    return tl.load(logits + token * stride + place, mask=place < vocabulary, other=-float("inf")).to(tl.float32)


@triton.jit
def _reduce(largest, totals, logits, stride, vocabulary, SLICE: tl.constexpr):
    """Compute the largest logit of a slice, and the sum of exp(logit - largest)."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = _read(logits, stride, token, part * SLICE + tl.arange(0, SLICE), vocabulary)
    # A slice may have no allowed token.
    most = tl.maximum(tl.max(values, 0), -1e30)
    at = token * tl.num_programs(1) + part
    tl.store(largest + at, most)
    tl.store(totals + at, tl.sum(tl.exp(values - most), 0))


@triton.jit
def _first_beyond(weights, fraction, place):
    """Return the first place where the running sum exceeds the fraction of the sum. Its weight is positive."""
    sums = tl.cumsum(weights, 0)
    beyond = (sums > fraction * tl.max(sums, 0)) & (weights > 0)
    # Running sums of float32 may fall by rounding. If no place exceeds the fraction, take the largest weight.
    found = tl.min(tl.where(beyond, place, 1 << 30), 0)
    return tl.where(found == 1 << 30, tl.argmax(weights, 0), found)


@triton.jit
def _draw(
    sampled,
    logprobs,
    largest,
    totals,
    logits,
    stride,
    states,
    temperatures,
    seeds,
    positions,
    vocabulary,
    slices,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Draw a slice and a token in it, or take the largest logit at temperature 0."""
    token = tl.program_id(0).to(tl.int64)
    # A padded token has the state -1.
    state = tl.maximum(tl.load(states + token), 0)
    is_greedy = tl.load(temperatures + state) == 0
    part, place = tl.arange(0, SLICES), tl.arange(0, SLICE)
    exists = part < slices
    most = tl.load(largest + token * slices + part, mask=exists, other=-1e30)
    total = tl.load(totals + token * slices + part, mask=exists, other=0.0)
    top = tl.max(most, 0)
    weights = total * tl.exp(most - top)

    first, second, _, _ = tl.randint4x(tl.load(seeds + state), tl.load(positions + token))
    # 24 bits, so that a fraction is below 1.
    of_slice = (first.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) / 16777216.0
    of_token = (second.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) / 16777216.0
    drawn = _first_beyond(weights, of_slice, part)
    chosen = tl.where(is_greedy, tl.argmax(most, 0), drawn)
    values = _read(logits, stride, token, chosen * SLICE + place, vocabulary)
    within = _first_beyond(tl.exp(values - tl.max(values, 0)), of_token, place)
    within = tl.where(is_greedy, tl.argmax(values, 0), within)
    own = tl.sum(tl.where(place == within, values, 0.0), 0)
    # Logits of NaN must not lead to a token that does not exist.
    tl.store(sampled + token, tl.minimum(chosen * SLICE + within, vocabulary - 1).to(tl.int64))
    tl.store(logprobs + token, own - top - tl.log(tl.sum(weights, 0)))


def sample(
    logits: Tensor, states: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, width: int = 4096
) -> tuple[Tensor, Tensor]:
    """Return the sampled tokens, (N) int64, and their logprobs, (N) float32 in nats.

    The random numbers depend on a request's seed and the token's position alone.

    Args:
        logits: (N, V), bfloat16 or float32, already divided by the temperature. -inf forbids a token.
        states: (N), int32, the request state of each token.
        temperatures: (R), float32. 0 takes the largest logit.
        seeds: (R), int64.
        positions: (N), position of each token in its sequence.
        width: entries of a slice, a power of two.
    """
    count, vocabulary = logits.shape
    slices, stride = -(-vocabulary // width), logits.stride(0)
    # Separate tensors are aligned. Triton compiles for aligned and other addresses separately.
    largest = torch.empty(count, slices, dtype=torch.float32, device=logits.device)
    totals = torch.empty_like(largest)
    sampled = torch.empty(count, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
    reduce: Any = _reduce[(count, slices)]
    reduce(largest, totals, logits, stride, vocabulary, SLICE=width, num_warps=_WARPS)
    draw: Any = _draw[(count,)]
    draw(
        *(sampled, logprobs, largest, totals, logits, stride),
        *(states.contiguous(), temperatures, seeds, positions.contiguous(), vocabulary, slices),
        SLICE=width,
        SLICES=triton.next_power_of_2(slices),
        num_warps=_WARPS,
    )
    return sampled, logprobs
