"""The model's last matrix and what is read of its logits in one, so that no float32 logits exist as a whole.

Shapes: N positions, H hidden, v entries of the vocabulary on this tensor-parallel rank, s of them in a slice, k of the
largest. The idea is that of cut cross-entropy (Wijmans et al. 2025, arXiv:2411.09009), for a split vocabulary: a slice
of the vocabulary at a time, whose logits are computed a second time for the backward pass, or kept for it in the
model's precision.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.config.sizes import VOCABULARY_SLICE
from nemo_rl_lite.policy.megatron import slice_scores
from nemo_rl_lite.policy.megatron.slice_scores import Head, Totals, joined


class LinearScores(torch.autograd.Function):
    """(hidden [N, H], weight [v, H], next tokens [N], head) -> logprobs [N], entropy [N] or None, largest logits [N, k]
    or None, their tokens [N, k] or None; float32, logits divided by the temperature.

    The gradient of `hidden` is this rank's share of it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_vH: Tensor, next_N: Tensor, head: Head
    ) -> tuple[Tensor | None, ...]:
        own_N = next_N - dist.get_rank(head.group) * len(weight_vH)
        reader = _ways(hidden_NH, head).Reader(own_N, head)
        kept: list[Tensor] = []
        for start, slice_sH in _slices(weight_vH):
            logits_Ns = hidden_NH @ slice_sH.T
            reader.read(logits_Ns, start)
            if head.keep:
                kept.append(logits_Ns)
        log_total_N, chosen_N, entropy_N = _of_all_ranks(reader.totals(), head)
        top_Nk, ids_Nk = reader.largest()
        if ids_Nk is not None:
            ctx.mark_non_differentiable(ids_Nk)
        ctx.head, ctx.kept, logprob_N = head, kept, chosen_N - log_total_N
        ctx.save_for_backward(hidden_NH, weight_vH, own_N, log_total_N, logprob_N, entropy_N, ids_Nk)
        return logprob_N.clone(), entropy_N.clone() if head.entropy else None, top_Nk, ids_Nk

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        head, (hidden_NH, weight_vH, own_N, *totals) = ctx.head, ctx.saved_tensors
        scaled = [None if one is None else one / head.temperature for one in gradients[:3]]
        gradient = _ways(hidden_NH, head).Gradient(own_N, head, Totals(*totals), scaled)
        factor_N1 = gradient.factor_N1
        scaled_NH = hidden_NH if factor_N1 is None else (hidden_NH * factor_N1).to(hidden_NH.dtype)
        of_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        of_weight_vH = torch.empty_like(weight_vH) if ctx.needs_input_grad[1] else None
        # A gradient may take the place of its logits, so that these serve once.
        kept, ctx.kept = ctx.kept[::-1], []
        for start, slice_sH in _slices(weight_vH):
            of_logits_Ns = gradient.of(kept.pop() if kept else hidden_NH @ slice_sH.T, start)
            _add_product(of_hidden_NH, of_logits_Ns, slice_sH)
            if of_weight_vH is not None:
                torch.mm(of_logits_Ns.T, scaled_NH, out=of_weight_vH[start : start + len(slice_sH)])
        whole_NH = of_hidden_NH if factor_N1 is None else of_hidden_NH * factor_N1
        return whole_NH.to(hidden_NH.dtype), of_weight_vH, None, None


def _ways(hidden_NH: Tensor, head: Head) -> Any:
    """The module that has `Reader` and `Gradient` for these logits."""
    if not hidden_NH.is_cuda or head.soft_cap is not None or head.topk:
        return slice_scores
    from nemo_rl_lite.policy.megatron import slice_scores_kernel

    return slice_scores_kernel


def _slices(weight_vH: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield slices of the vocabulary with their first entries; their width does not depend on the batch."""
    for start in range(0, len(weight_vH), VOCABULARY_SLICE):
        yield start, weight_vH[start : start + VOCABULARY_SLICE]


def _of_all_ranks(totals_3N: Tensor, head: Head) -> Tensor:
    """The totals [3, N] of the vocabulary of all ranks from those of this rank's part."""
    ranks = dist.get_world_size(head.group)
    if ranks == 1:
        return totals_3N
    gathered = torch.empty(ranks, *totals_3N.shape, device=totals_3N.device)
    dist.all_gather(list(gathered), totals_3N, head.group)
    return joined(gathered)


def _add_product(sum_NH: Tensor, left_Ns: Tensor, right_sH: Tensor) -> None:
    """Add a matrix product to a float32 sum; on GPUs in one kernel, which does not round the product first."""
    if sum_NH.is_cuda:
        torch.addmm(sum_NH, left_Ns, right_sH, out_dtype=torch.float32, out=sum_NH)
    else:
        sum_NH += left_Ns @ right_sH
