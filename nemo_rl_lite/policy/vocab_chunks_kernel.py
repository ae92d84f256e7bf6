"""Triton kernels for `vocab_chunks`: one pass for a slice's reductions, one for its gradient.

Import this module only on machines with a GPU. Shapes: N positions, s entries of a slice. A slice is a contiguous
[N, s] tensor in bfloat16 or float32; sums are float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_rl_lite.policy.vocab_chunks import LMHead, VocabReductions

_WARPS = 8


@triton.jit
def _read(logits, own, state, rows, width, start, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Add a row of the slice to its state: m, the largest logit; the sum of exp(logit - m); the sum of
    exp(logit - m) (logit - m); the next token's logit."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(logits + row * width + column, mask=inside, other=-float("inf")).to(tl.float32) * scale
    at_largest = state + row
    at_total, at_weighted, at_chosen = at_largest + rows, at_largest + 2 * rows, at_largest + 3 * rows

    # Read all state before the first reduction, after which a warp may write it.
    before, total, weighted = tl.load(at_largest), tl.load(at_total), tl.load(at_weighted)
    largest = tl.maximum(before, tl.max(values, axis=0))
    shifted = values - largest
    powers = tl.exp(shifted)
    shrunk = tl.exp(before - largest)
    if ENTROPY:
        # Before the first slice, the largest logit is -inf and the sums are 0.
        lower = tl.where(total > 0, before - largest, 0.0)
        more = tl.sum(tl.where(inside, powers * shifted, 0.0), axis=0)
        tl.store(at_weighted, shrunk * (weighted + lower * total) + more)
    tl.store(at_total, total * shrunk + tl.sum(powers, axis=0))
    tl.store(at_largest, largest)

    place = tl.load(own + row) - start
    if (place >= 0) & (place < width):
        tl.store(at_chosen, tl.load(logits + row * width + place).to(tl.float32) * scale)


@triton.jit
def _differentiate(
    logits,
    own,
    log_total,
    entropy,
    of_logprob,
    of_entropy,
    of_own,
    width,
    start,
    scale,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace a row of the slice with its gradient: `of_own` at the next token, else -p (g + (log p + E) h). p is the
    probability, E the entropy, g and h the gradients of logprob and entropy."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    positions = logits + row * width + column
    logprobs = tl.load(positions, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(log_total + row)
    factor = tl.load(of_logprob + row)
    if ENTROPY:
        factor += (logprobs + tl.load(entropy + row)) * tl.load(of_entropy + row)
    place = tl.load(own + row) - start
    found = tl.where(column == place, tl.load(of_own + row), -tl.exp(logprobs) * factor)
    tl.store(positions, found.to(logits.dtype.element_ty), mask=inside)


class Reader:
    """`vocab_chunks.Reader` as a kernel, without soft cap, largest logits and other tokens."""

    def __init__(self, own_N: Tensor, head: LMHead, others_Nk: None = None):
        self._own_N, self._scale, self._entropy = own_N.contiguous(), 1 / head.temperature, head.entropy
        self._state_4N = torch.zeros(4, len(own_N), dtype=torch.float32, device=own_N.device)
        self._state_4N[0] = -torch.inf

    def read(self, logits_Ns: Tensor, start: int) -> None:
        rows, width = logits_Ns.shape
        launch: Any = _read[(rows,)]
        launch(
            *(logits_Ns, self._own_N, self._state_4N, rows, width, start, self._scale),
            ENTROPY=self._entropy,
            BLOCK=triton.next_power_of_2(width),
            num_warps=_WARPS,
        )

    def totals(self) -> Tensor:
        largest_N, total_N, weighted_N, chosen_N = self._state_4N
        log_N = total_N.log()
        entropy_N = log_N - weighted_N / total_N if self._entropy else torch.zeros_like(log_N)
        return torch.stack([largest_N + log_N, chosen_N, entropy_N])


class Gradient:
    """`vocab_chunks.Gradient` as a kernel, for the same cases. It overwrites its logits."""

    factor_N1 = None

    def __init__(self, own_N: Tensor, head: LMHead, totals: VocabReductions, gradients: Sequence[Tensor | None]):
        of_logprob_N, of_entropy_N, *_ = gradients
        self._scale, self._entropy = 1 / head.temperature, of_entropy_N is not None
        log_total_N, logprob_N, entropy_N = totals.log_total_N, totals.logprob_N, totals.entropy_N
        # expm1 is exact for nearly certain tokens.
        of_own_N = -logprob_N.expm1() * of_logprob_N  # pyrefly: ignore
        if of_entropy_N is not None:
            of_own_N = of_own_N - logprob_N.exp() * (logprob_N + entropy_N) * of_entropy_N
        rows = (log_total_N, entropy_N, of_logprob_N, entropy_N if of_entropy_N is None else of_entropy_N, of_own_N)
        self._rows = [own_N.contiguous(), *(values.contiguous() for values in rows)]  # pyrefly: ignore

    def of(self, logits_Ns: Tensor, start: int) -> Tensor:
        rows, width = logits_Ns.shape
        launch: Any = _differentiate[(rows,)]
        launch(
            *(logits_Ns, *self._rows, width, start, self._scale),
            ENTROPY=self._entropy,
            BLOCK=triton.next_power_of_2(width),
            num_warps=_WARPS,
        )
        return logits_Ns
