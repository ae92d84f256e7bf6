"""The model's last matrix and what is read of its logits in one, so that the logits never exist as a whole.

Shapes: N positions, H hidden, v entries of the vocabulary on this tensor-parallel rank, s of them in a slice, k of the
largest. The idea is that of cut cross-entropy (Wijmans et al. 2025, arXiv:2411.09009), in torch and for a split
vocabulary: a slice of the vocabulary at a time, whose logits are computed a second time for the backward pass.
"""

from collections.abc import Iterator
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
    """(hidden [N, H], weight [v, H], next tokens [N], head) -> logprobs [N], entropy [N] or None, largest logits [N, k]
    or None, their tokens [N, k] or None; float32, logits divided by the temperature.

    The gradient of `hidden` is this rank's share of it. With p the probabilities and E the entropy, the gradient of a
    token's logprob by its logits is (1 for the token) - p, and that of its entropy -p (log p + E).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_vH: Tensor, next_N: Tensor, head: Head
    ) -> tuple[Tensor | None, ...]:
        positions = len(hidden_NH)
        largest_N = hidden_NH.new_full((positions,), torch.finfo(torch.float32).min, dtype=torch.float32)
        total_N, weighted_N, chosen_N = (torch.zeros_like(largest_N) for _ in range(3))
        own_N, tops = next_N - dist.get_rank(head.group) * len(weight_vH), []
        for start, slice_sH in _slices(weight_vH):
            logits_Ns = _logits(hidden_NH, slice_sH, head)
            if head.topk:
                values, ids = logits_Ns.topk(min(head.topk, logits_Ns.shape[1]), dim=1)
                tops.append((values, ids + start))
            index_N, inside_N = _places(own_N, start, len(slice_sH))
            chosen_N += torch.where(inside_N, logits_Ns.gather(1, index_N[:, None])[:, 0], 0.0)
            before_N, largest_N = largest_N, torch.maximum(largest_N, logits_Ns.amax(dim=1))
            _rescale(total_N, weighted_N, before_N - largest_N)
            shifted_Ns = logits_Ns.sub_(largest_N[:, None])
            exp_Ns = shifted_Ns.exp() if head.entropy else shifted_Ns.exp_()
            total_N += exp_Ns.sum(dim=1)
            if head.entropy:
                weighted_N += exp_Ns.mul_(shifted_Ns).sum(dim=1)
        if dist.get_world_size(head.group) > 1:
            before_N = largest_N.clone()
            dist.all_reduce(largest_N, dist.ReduceOp.MAX, head.group)
            _rescale(total_N, weighted_N, before_N - largest_N)
            sums_3N = torch.stack([total_N, weighted_N, chosen_N])
            dist.all_reduce(sums_3N, dist.ReduceOp.SUM, head.group)
            total_N, weighted_N, chosen_N = sums_3N
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N if head.entropy else None
        top_Nk = ids_Nk = None
        if head.topk:
            values, ids = (torch.cat(parts, dim=1) for parts in zip(*tops, strict=True))
            top_Nk, places_Nk = values.topk(head.topk, dim=1)
            ids_Nk = ids.gather(1, places_Nk)
            ctx.mark_non_differentiable(ids_Nk)
        ctx.head = head
        ctx.save_for_backward(hidden_NH, weight_vH, own_N, largest_N + log_total_N, entropy_N, ids_Nk)
        return chosen_N - largest_N - log_total_N, entropy_N, top_Nk, ids_Nk

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        # Whatever follows the logits divides their gradient by the temperature.
        logprob_N: Tensor = gradients[0] / ctx.head.temperature
        entropy_N, top_Nk = (None if one is None else one / ctx.head.temperature for one in gradients[1:3])
        hidden_NH, weight_vH, own_N, log_total_N, entropies_N, ids_Nk = ctx.saved_tensors
        of_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        of_weight_vH = torch.empty_like(weight_vH) if ctx.needs_input_grad[1] else None
        for start, slice_sH in _slices(weight_vH):
            logits_Ns = _logits(hidden_NH, slice_sH, ctx.head)
            bend_Ns = _bend(logits_Ns, ctx.head)
            logprobs_Ns = logits_Ns.sub_(log_total_N[:, None])
            if entropy_N is None:
                of_logits_Ns = logprobs_Ns.exp_().mul_(-logprob_N[:, None])
            else:
                factor_Ns = (logprobs_Ns + entropies_N[:, None]).mul_(entropy_N[:, None]).add_(logprob_N[:, None])
                of_logits_Ns = logprobs_Ns.exp_().mul_(factor_Ns).neg_()
            wanted = [(own_N[:, None], logprob_N[:, None]), *([(ids_Nk, top_Nk)] if top_Nk is not None else [])]
            for ids, own in wanted:
                index, inside = _places(ids, start, len(slice_sH))
                of_logits_Ns.scatter_add_(1, index, torch.where(inside, own, 0.0))
            if bend_Ns is not None:
                of_logits_Ns.mul_(bend_Ns)
            rounded_Ns = of_logits_Ns.to(hidden_NH.dtype)
            of_hidden_NH += rounded_Ns @ slice_sH
            if of_weight_vH is not None:
                torch.mm(rounded_Ns.T, hidden_NH, out=of_weight_vH[start : start + len(slice_sH)])
        return of_hidden_NH.to(hidden_NH.dtype), of_weight_vH, None, None


def _slices(weight_vH: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield slices of the vocabulary with their first entries; their width does not depend on the batch."""
    for start in range(0, len(weight_vH), VOCABULARY_SLICE):
        yield start, weight_vH[start : start + VOCABULARY_SLICE]


def _logits(hidden_NH: Tensor, slice_sH: Tensor, head: Head) -> Tensor:
    """The slice's logits [N, s] as float32, rounded as the model's matrices are, in memory of their own."""
    logits_Ns = (hidden_NH @ slice_sH.T).float()
    if head.soft_cap is not None:
        logits_Ns = logits_Ns.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
    return logits_Ns.div_(head.temperature) if head.temperature != 1 else logits_Ns


def _bend(logits_Ns: Tensor, head: Head) -> Tensor | None:
    """The derivative of the soft cap where it gives these logits; None without one."""
    if head.soft_cap is None:
        return None
    return 1 - (logits_Ns * (head.temperature / head.soft_cap)).square_()


def _places(ids: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Places of entries of the vocabulary in a slice, 0 for others, and whether they are in it."""
    inside = (ids >= start) & (ids < start + width)
    return torch.where(inside, ids - start, 0), inside


def _rescale(total_N: Tensor, weighted_N: Tensor, log_factor_N: Tensor) -> None:
    """Sums of exp(x - m) and of exp(x - m) (x - m), in place, for another m: `log_factor` is the old one minus it."""
    factor_N = log_factor_N.exp()
    # Where nothing was summed yet, the old m is the smallest number, and 0 times it is 0.
    weighted_N.addcmul_(total_N, log_factor_N).mul_(factor_N)
    total_N.mul_(factor_N)
