"""Reductions over slices of logits, and their gradient, in torch: on CPUs, and for cases without a Triton kernel.

Shapes: N positions; v vocabulary entries on this tensor-parallel rank; s entries of a slice; k largest or other tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class LMHead:
    """Options of an LM head's logits and scores."""

    temperature: float
    soft_cap: float | None
    """Logits are `soft_cap * tanh(logits / soft_cap)`, before the temperature (Gemma 2)."""
    entropy: bool
    topk: int
    """Number of largest logits; 0 for none."""
    group: dist.ProcessGroup
    """Ranks that split the vocabulary."""
    keep: bool = False
    """Keep the logits [N, v] for the backward pass instead of recomputing them."""
    others: bool = False
    """Compute logprobs of k further tokens per position."""


@dataclass(frozen=True)
class VocabReductions:
    """Reductions over the full vocabulary that a slice's backward pass needs. Token ids are relative to this rank's
    first entry."""

    log_total_N: Tensor
    """log sum exp(logits)."""
    logprob_N: Tensor
    entropy_N: Tensor
    ids_Nk: Tensor | None
    """Tokens of the largest logits."""
    others_Nk: Tensor | None = None


class Reader:
    """Reads slices in order. `own_N`: next tokens; `others_Nk`: tokens of `head.others`. Both are relative to this
    rank's first entry, so tokens of other ranks are outside all slices."""

    def __init__(self, own_N: Tensor, head: LMHead, others_Nk: Tensor | None = None):
        self._own_N, self._head, self._others_Nk = own_N, head, others_Nk
        self._parts: list[Tensor] = []
        self._chosen: list[Tensor] = []
        self._tops: list[tuple[Tensor, Tensor]] = []

    def read(self, logits_Ns: Tensor, start: int) -> None:
        """Read the slice that starts at entry `start`."""
        logits_Ns = _warped(logits_Ns, self._head)
        if self._head.topk:
            values, ids = logits_Ns.topk(min(self._head.topk, logits_Ns.shape[1]), dim=1)
            self._tops.append((values.float(), ids + start))
        if self._others_Nk is not None:
            self._chosen.append(_chosen(logits_Ns, self._others_Nk, start))
        chosen_N = _chosen(logits_Ns, self._own_N[:, None], start)[:, 0]
        first_N, logprobs_Ns = logits_Ns[:, 0].float(), logits_Ns.log_softmax(dim=1, dtype=torch.float32)
        entropy_N = torch.zeros_like(first_N)
        if self._head.entropy:
            entropy_N = -(logprobs_Ns.exp().mul_(logprobs_Ns)).sum(dim=1)
        self._parts.append(torch.stack([first_N - logprobs_Ns[:, 0], chosen_N, entropy_N]))

    def totals(self) -> Tensor:
        """Return [3, N]: log sum exp(logits), the next token's logit (0 on other ranks), the entropy (undefined without
        `head.entropy`)."""
        return joined(torch.stack(self._parts))

    def largest(self) -> tuple[Tensor, Tensor]:
        """Return the largest logits [N, k] and their tokens; all if fewer than k."""
        values, ids = (torch.cat(parts, dim=1) for parts in zip(*self._tops, strict=True))
        return largest(values, ids, self._head.topk)

    def others(self) -> Tensor:
        """Return the logits [N, k] of the other tokens; 0 for tokens of other ranks."""
        return torch.stack(self._chosen).sum(dim=0)


class Gradient:
    """Gradient of slices of logits. `gradients`, divided by the temperature or None: of logprobs, entropies, largest
    logits, logprobs of the other tokens."""

    def __init__(self, own_N: Tensor, head: LMHead, totals: VocabReductions, gradients: Sequence[Tensor | None]):
        self._own_N, self._head, self._totals, self._gradients = own_N, head, totals, gradients
        of_logprob_N = gradients[0]
        # If plain, a row is a factor times (1 for the next token) - p. The factor is cheaper to apply to H values.
        self._plain = head.soft_cap is None and all(other is None for other in gradients[1:])
        self.factor_N1 = -of_logprob_N[:, None] if self._plain else None  # pyrefly: ignore

    def of(self, logits_Ns: Tensor, start: int) -> Tensor:
        """Return the gradient [N, s] of the slice at `start`. Multiply it by `factor_N1`, if any."""
        dtype, logits_Ns = logits_Ns.dtype, _warped(logits_Ns, self._head)
        if not self._plain:
            return self._general(logits_Ns, start).to(dtype)
        found_Ns = torch.empty_like(logits_Ns, dtype=dtype)
        torch.exp(logits_Ns - self._totals.log_total_N[:, None], out=found_Ns)
        index_N1, inside_N1 = _places(self._own_N[:, None], start, logits_Ns.shape[1])
        less_N1 = self._totals.logprob_N.expm1()[:, None].to(dtype)
        return found_Ns.scatter_(1, index_N1, torch.where(inside_N1, less_N1, found_Ns.gather(1, index_N1)))

    def _general(self, logits_Ns: Tensor, start: int) -> Tensor:
        """Return the gradient of all scores.

        Of a logprob: (1 for the token) - p. Of the entropy E: -p (log p + E). Of a large logit: 1.
        """
        totals, cap = self._totals, self._head.soft_cap
        of_logprob_N, of_entropy_N, of_top_Nk, of_others_Nk = self._gradients
        of_logprob_N1 = of_logprob_N[:, None]  # pyrefly: ignore
        logprobs_Ns, factor_Ns = logits_Ns - totals.log_total_N[:, None], of_logprob_N1
        if of_entropy_N is not None:
            factor_Ns = factor_Ns + (logprobs_Ns + totals.entropy_N[:, None]) * of_entropy_N[:, None]
        if of_others_Nk is not None:
            factor_Ns = factor_Ns + of_others_Nk.sum(dim=1, keepdim=True)
        found_Ns = logprobs_Ns.exp_().mul_(factor_Ns).neg_()
        chosen = (self._own_N[:, None], of_logprob_N1)
        for ids, gradient in (chosen, (totals.ids_Nk, of_top_Nk), (totals.others_Nk, of_others_Nk)):
            if ids is not None and gradient is not None:
                index, inside = _places(ids, start, logits_Ns.shape[1])
                found_Ns.scatter_add_(1, index, torch.where(inside, gradient, 0.0))
        if cap is None:
            return found_Ns
        return found_Ns.mul_(1 - (logits_Ns * (self._head.temperature / cap)).square_())


def joined(parts_k3N: Tensor) -> Tensor:
    """Combine the `totals` of k parts of a vocabulary."""
    log_totals_kN, chosen_kN, entropies_kN = parts_k3N.unbind(1)
    log_total_N = log_totals_kN.logsumexp(dim=0)
    log_shares_kN = log_totals_kN - log_total_N
    entropy_N = (log_shares_kN.exp() * (entropies_kN - log_shares_kN)).sum(dim=0)
    return torch.stack([log_total_N, chosen_kN.sum(dim=0), entropy_N])


def largest(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of each row, in descending order, and their ids."""
    top, places = values.topk(min(count, values.shape[1]), dim=1)
    return top, ids.gather(1, places)


def _warped(logits_Ns: Tensor, head: LMHead) -> Tensor:
    """Apply soft cap and temperature; returns a float32 copy if logits change."""
    if head.soft_cap is not None:
        logits_Ns = (logits_Ns.float() / head.soft_cap).tanh_().mul_(head.soft_cap)
    return logits_Ns.float() / head.temperature if head.temperature != 1 else logits_Ns


def _chosen(logits_Ns: Tensor, ids_Nk: Tensor, start: int) -> Tensor:
    """Return a slice's logits of tokens, float32 [N, k]; 0 for tokens outside."""
    index_Nk, inside_Nk = _places(ids_Nk, start, logits_Ns.shape[1])
    return torch.where(inside_Nk, logits_Ns.gather(1, index_Nk).float(), 0.0)


def _places(ids: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the indices of tokens in a slice (0 if outside), and a mask of those inside."""
    inside = (ids >= start) & (ids < start + width)
    return torch.where(inside, ids - start, 0), inside
