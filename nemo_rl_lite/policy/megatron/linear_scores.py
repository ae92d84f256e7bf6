"""The model's last matrix and what is read of its logits in one, so that the logits never exist as a whole.

Shapes: N positions, H hidden, v entries of the vocabulary on this tensor-parallel rank, s of them in a slice, k of the
largest, or of those that are asked for. The idea is that of cut cross-entropy (Wijmans et al. 2025, arXiv:2411.09009),
in torch and for a split vocabulary: a slice of the vocabulary at a time, whose logits are computed a second time for
the backward pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.config.sizes import VOCABULARY_SLICE


@dataclass(frozen=True)
class Head:
    """What is computed of the logits, and how these are made."""

    temperature: float
    soft_cap: float | None
    """Logits are `soft_cap * tanh(logits / soft_cap)`, before the temperature (Gemma 2)."""
    entropy: bool
    topk: int
    """How many of the largest logits are wanted; 0 for none."""
    group: dist.ProcessGroup
    """The ranks that have a part of the vocabulary each."""


class LinearScores(torch.autograd.Function):
    """(hidden [N, H], weight [v, H], next tokens [N], other tokens [N, k] or None, head) -> logprobs [N], entropy [N]
    or None, largest logits [N, k] or None, their tokens [N, k] or None, logprobs of the other tokens [N, k] or None;
    float32, logits divided by the temperature.

    The gradient of `hidden` is this rank's share of it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_vH: Tensor, next_N: Tensor, others_Nk: Tensor | None, head: Head
    ) -> tuple[Tensor | None, ...]:
        first, ranks = dist.get_rank(head.group) * len(weight_vH), dist.get_world_size(head.group)
        own_N, parts, tops, others = next_N - first, [], [], []
        own_others_Nk = None if others_Nk is None else others_Nk - first
        for start, slice_sH in _slices(weight_vH):
            logits_Ns = _logits(hidden_NH, slice_sH, head)
            if head.topk:
                values, ids = logits_Ns.topk(min(head.topk, logits_Ns.shape[1]), dim=1)
                tops.append((values.float(), ids + start + first))
            if own_others_Nk is not None:
                others.append(_chosen(logits_Ns, own_others_Nk, start))
            index_N, inside_N = _places(own_N, start, len(slice_sH))
            chosen_N = torch.where(inside_N, logits_Ns.gather(1, index_N[:, None])[:, 0].float(), 0.0)
            first_N, logprobs_Ns = logits_Ns[:, 0].float(), logits_Ns.log_softmax(dim=1, dtype=torch.float32)
            parts.append(torch.stack([first_N - logprobs_Ns[:, 0], chosen_N, _entropy(logprobs_Ns, head)]))
        log_total_N, chosen_N, entropy_N = _joined(torch.stack(parts))
        if ranks > 1:
            gathered = torch.empty(ranks, 3, len(hidden_NH), device=hidden_NH.device)
            dist.all_gather(list(gathered), torch.stack([log_total_N, chosen_N, entropy_N]), head.group)
            log_total_N, chosen_N, entropy_N = _joined(gathered)
        top_Nk = ids_Nk = None
        if head.topk:
            values, ids = (torch.cat(parts, dim=1) for parts in zip(*tops, strict=True))
            top_Nk, ids_Nk = _largest(values, ids, head.topk)
            if ranks > 1:
                top_Nk, ids_Nk = _largest(_of_ranks(top_Nk, head.group), _of_ranks(ids_Nk, head.group), head.topk)
            ctx.mark_non_differentiable(ids_Nk)
        other_logprobs_Nk = None
        if others:
            other_logits_Nk = torch.stack(others).sum(dim=0)
            if ranks > 1:
                dist.all_reduce(other_logits_Nk, group=head.group)
            other_logprobs_Nk = other_logits_Nk - log_total_N[:, None]
        ctx.head, logprob_N = head, chosen_N - log_total_N
        own_ids_Nk = None if ids_Nk is None else ids_Nk - first
        ctx.save_for_backward(hidden_NH, weight_vH, own_N, log_total_N, logprob_N, entropy_N, own_ids_Nk, own_others_Nk)
        return logprob_N.clone(), entropy_N if head.entropy else None, top_Nk, ids_Nk, other_logprobs_Nk

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        head, (hidden_NH, weight_vH, own_N, log_total_N, logprob_N, *others) = ctx.head, ctx.saved_tensors
        of_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        of_weight_vH = torch.empty_like(weight_vH) if ctx.needs_input_grad[1] else None
        # Whatever follows the logits divides their gradient by the temperature.
        wanted = (*gradients[:3], gradients[4])
        scaled: list[Any] = [None if one is None else one / head.temperature for one in wanted]
        simple = head.soft_cap is None and not head.entropy and not head.topk and gradients[4] is None
        # A row of the simple gradient has the same factor everywhere, which is cheaper where it meets H values.
        factor_N1 = -scaled[0][:, None] if simple else torch.ones_like(log_total_N)[:, None]
        scaled_NH = (hidden_NH * factor_N1).to(hidden_NH.dtype) if simple else hidden_NH
        for start, slice_sH in _slices(weight_vH):
            logits_Ns = _logits(hidden_NH, slice_sH, head)
            if simple:
                of_logits_Ns = torch.empty_like(logits_Ns, dtype=hidden_NH.dtype)
                torch.exp(logits_Ns - log_total_N[:, None], out=of_logits_Ns)
                index_N1, inside_N1 = _places(own_N[:, None], start, len(slice_sH))
                kept_N1 = of_logits_Ns.gather(1, index_N1)
                less_N1 = logprob_N.expm1()[:, None].to(of_logits_Ns.dtype)
                of_logits_Ns.scatter_(1, index_N1, torch.where(inside_N1, less_N1, kept_N1))
            else:
                found_Ns = _of_logits(logits_Ns, start, head, scaled, own_N, log_total_N, *others)
                of_logits_Ns = found_Ns.to(hidden_NH.dtype)
            of_hidden_NH += of_logits_Ns @ slice_sH
            if of_weight_vH is not None:
                torch.mm(of_logits_Ns.T, scaled_NH, out=of_weight_vH[start : start + len(slice_sH)])
        return (of_hidden_NH * factor_N1).to(hidden_NH.dtype), of_weight_vH, None, None, None


def _slices(weight_vH: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield slices of the vocabulary with their first entries; their width does not depend on the batch."""
    for start in range(0, len(weight_vH), VOCABULARY_SLICE):
        yield start, weight_vH[start : start + VOCABULARY_SLICE]


def _logits(hidden_NH: Tensor, slice_sH: Tensor, head: Head) -> Tensor:
    """The slice's logits [N, s] as the model's matrix product rounds them; float32 where they are computed with."""
    logits_Ns = hidden_NH @ slice_sH.T
    if head.soft_cap is not None:
        logits_Ns = logits_Ns.float().div_(head.soft_cap).tanh_().mul_(head.soft_cap)
    return logits_Ns.float().div_(head.temperature) if head.temperature != 1 else logits_Ns


def _chosen(logits_Ns: Tensor, ids_Nk: Tensor, start: int) -> Tensor:
    """The slice's logits of the tokens `ids_Nk`, 0 for those that are not in it."""
    index_Nk, inside_Nk = _places(ids_Nk, start, logits_Ns.shape[1])
    return torch.where(inside_Nk, logits_Ns.gather(1, index_Nk).float(), 0.0)


def _largest(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """At most `count` largest values of each row, in descending order, and their ids."""
    top, places = values.topk(min(count, values.shape[1]), dim=1)
    return top, ids.gather(1, places)


def _of_ranks(values_Nk: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values of all ranks, next to each other."""
    gathered = [torch.empty_like(values_Nk) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, values_Nk.contiguous(), group)
    return torch.cat(gathered, dim=1)


def _entropy(logprobs_Ns: Tensor, head: Head) -> Tensor:
    """Entropy [N] of a slice by itself; 0 where nobody asks."""
    return -(logprobs_Ns.exp().mul_(logprobs_Ns)).sum(dim=1) if head.entropy else torch.zeros_like(logprobs_Ns[:, 0])


def _joined(parts_k3N: Tensor) -> Tensor:
    """The log of the sum of exp(logits), the next token's logit (0 where it is not) and the entropy: [3, N] of all of
    the vocabulary from [k, 3, N] of its k parts."""
    log_totals_kN, chosen_kN, entropies_kN = parts_k3N.unbind(1)
    log_total_N = log_totals_kN.logsumexp(dim=0)
    log_shares_kN = log_totals_kN - log_total_N
    entropy_N = (log_shares_kN.exp() * (entropies_kN - log_shares_kN)).sum(dim=0)
    return torch.stack([log_total_N, chosen_kN.sum(dim=0), entropy_N])


def _of_logits(
    logits_Ns: Tensor,
    start: int,
    head: Head,
    gradients: Sequence[Tensor | None],
    own_N: Tensor,
    log_total_N: Tensor,
    entropy_N: Tensor,
    ids_Nk: Tensor | None,
    others_Nk: Tensor | None,
) -> Tensor:
    """The gradient of a slice's logits [N, s]. With p the probabilities and E the entropy, that of a token's logprob is
    (1 for the token) - p, that of the entropy -p (log p + E), that of a large logit 1."""
    of_logprob_N, of_entropy_N, of_top_Nk, of_others_Nk = gradients
    logprobs_Ns, factor_Ns = logits_Ns - log_total_N[:, None], of_logprob_N[:, None]  # pyrefly: ignore
    if of_entropy_N is not None:
        factor_Ns = factor_Ns + (logprobs_Ns + entropy_N[:, None]) * of_entropy_N[:, None]
    if of_others_Nk is not None:
        factor_Ns = factor_Ns + of_others_Nk.sum(dim=1, keepdim=True)
    found_Ns = logprobs_Ns.exp_().mul_(factor_Ns).neg_()
    chosen = (own_N[:, None], of_logprob_N[:, None])  # pyrefly: ignore
    for ids, gradient in (chosen, (ids_Nk, of_top_Nk), (others_Nk, of_others_Nk)):
        if ids is not None and gradient is not None:
            index, inside = _places(ids, start, logits_Ns.shape[1])
            found_Ns.scatter_add_(1, index, torch.where(inside, gradient, 0.0))
    if head.soft_cap is None:
        return found_Ns
    return found_Ns.mul_(1 - (logits_Ns * (head.temperature / head.soft_cap)).square_())


def _places(ids: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Places of entries of the vocabulary in a slice, 0 for others, and whether they are in it."""
    inside = (ids >= start) & (ids < start + width)
    return torch.where(inside, ids - start, 0), inside
