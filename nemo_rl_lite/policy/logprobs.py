"""Fused LM head and scores of a model's last hidden states: logprobs, entropy, largest logits.

Full float32 logits are never materialized. The vocabulary is processed in slices; the backward pass recomputes their
logits, or reads them in the model's precision. See Cut Cross-Entropy (Wijmans et al. 2025, arXiv:2411.09009); here the
vocabulary may be split over ranks.

Shapes: b sequences of T tokens in n rows. On this rank: N positions, v vocabulary entries, s entries of a slice. H
hidden, k largest or other tokens. Values are float32, with a gradient outside `no_grad`.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.config.sizes import VOCABULARY_SLICE
from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.losses.interface import Loss, Need, needs_of
from nemo_rl_lite.policy import vocab_chunks
from nemo_rl_lite.policy.context import Shard
from nemo_rl_lite.policy.vocab_chunks import LMHead, VocabReductions, joined, largest


@dataclass(frozen=True)
class TopLogits:
    """Request for each token's `topk` largest logits, declared as in a loss."""

    topk: int
    needs: ClassVar[frozenset[Need]] = frozenset({"topk_logits"})


def scores_of(
    shard: Shard,
    temperature: float,
    loss: Loss | TopLogits | None,
    wait_for: Callable[[Tensor], None],
    teacher_ids_bTk: Tensor | None = None,
    keep: bool = False,
) -> Callable[..., dict[str, Tensor]]:
    """Return an `output_processor` for megatron-core, which replaces the LM head.

    Its results are `logprobs` [b, T] and the other scores that `loss` needs, by `Batch`'s field names;
    `student_topk_logprobs` are of `teacher_ids_bTk`. `wait_for` is called with the head's weight before its use,
    because its module's forward pass does not run. `keep`: keep logits for the backward pass.
    """
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel import mappings

    needs = frozenset() if loss is None else needs_of(loss)
    of_teacher = "student_topk_logprobs" in needs
    if of_teacher and teacher_ids_bTk is None:
        raise ValueError("the loss reads student_topk_logprobs, but this run's batches have no teacher_topk_ids")
    topk = loss.topk if "topk_logits" in needs else 0  # pyrefly: ignore  # a loss with this need has it

    def scores(
        hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: object
    ) -> dict[str, Tensor]:
        weight_vH = output_layer.weight if output_weight is None else output_weight
        wait_for(weight_vH)
        cap, group = _soft_cap(output_layer), cast(dist.ProcessGroup, get_tensor_model_parallel_group())
        head = LMHead(temperature, cap, "entropy" in needs, topk, group, keep, others=of_teacher)
        # Hidden states of all positions; the backward pass sums the ranks' gradients.
        if output_layer.sequence_parallel:
            hidden_states = mappings.gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden_states = mappings.copy_to_tensor_model_parallel_region(hidden_states, group=group)
        hidden_NH = hidden_states.transpose(0, 1).flatten(0, 1)
        next_N = shard.next_tokens_nS.flatten()
        others_Nk = shard.pack(teacher_ids_bTk) if of_teacher and teacher_ids_bTk is not None else None
        names = ("logprobs", "entropy", "topk_logits", "topk_ids", "student_topk_logprobs")
        found = dict(zip(names, LinearScores.apply(hidden_NH, weight_vH, next_N, others_Nk, head), strict=True))
        return {name: shard.unpack(values) for name, values in found.items() if values is not None}

    return scores


def check_scorable(model: Any) -> None:
    """Raise TrainingError if `scores_of` does not support a model's last stage."""
    if "output_processor" not in inspect.signature(model.forward).parameters:
        raise TrainingError(
            f"policy.model_name: megatron-core's {type(model).__name__} has no output_processor, which computes "
            "logprobs; choose a model that megatron-core runs as GPTModel"
        )
    _soft_cap(model.output_layer)


def _soft_cap(output_layer: Any) -> float | None:
    """Return the soft cap of the logits (Gemma 2), or None. Raises TrainingError: the layer does more than multiply."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    kind, cap = type(output_layer), getattr(output_layer.config, "final_logit_softcapping", None)
    multiplies = isinstance(output_layer, ColumnParallelLinear) and output_layer.bias is None
    if not multiplies or output_layer.config.use_mup or (kind.forward is not ColumnParallelLinear.forward and not cap):
        raise TrainingError(
            f"policy.model_name: the output layer of this model ({kind.__name__}) is not a plain matrix, as logprobs "
            "need; choose another model, or no adapter on output_layer"
        )
    return cap if kind.forward is not ColumnParallelLinear.forward else None


class LinearScores(torch.autograd.Function):
    """(hidden [N, H], weight [v, H], next tokens [N], other tokens [N, k] or None, head) -> scores.

    Scores: logprobs [N]; or None: entropy [N]; largest logits [N, k]; their tokens [N, k]; logprobs of the other tokens
    [N, k]. The gradient of `hidden` is this rank's share.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_vH: Tensor, next_N: Tensor, others_Nk: Tensor | None, head: LMHead
    ) -> tuple[Tensor | None, ...]:
        # Scores that the loss only measures, such as the entropy, have the gradient None.
        ctx.set_materialize_grads(False)
        first = dist.get_rank(head.group) * len(weight_vH)
        own_N, own_others_Nk = next_N - first, None if others_Nk is None else others_Nk - first
        reader = _implementation(hidden_NH, head).Reader(own_N, head, own_others_Nk)
        kept: list[Tensor] = []
        for start, slice_sH in _slices(weight_vH):
            logits_Ns = hidden_NH @ slice_sH.T
            reader.read(logits_Ns, start)
            if head.keep:
                kept.append(logits_Ns)
        is_split, totals_3N = dist.get_world_size(head.group) > 1, reader.totals()
        if is_split:
            totals_3N = joined(torch.stack(_of_ranks(totals_3N, head)))
        log_total_N, chosen_N, entropy_N = totals_3N
        top_Nk = ids_Nk = own_ids_Nk = other_logprobs_Nk = None
        if head.topk:
            top_Nk, own_ids_Nk = reader.largest()
            ids_Nk = own_ids_Nk + first
            if is_split:
                tops_Nm, ids_Nm = (torch.cat(_of_ranks(values, head), dim=1) for values in (top_Nk, ids_Nk))
                top_Nk, ids_Nk = largest(tops_Nm, ids_Nm, head.topk)
                own_ids_Nk = ids_Nk - first
            ctx.mark_non_differentiable(ids_Nk)
        if head.others:
            others_Nk = reader.others()
            if is_split:
                dist.all_reduce(others_Nk, group=head.group)
            other_logprobs_Nk = others_Nk - log_total_N[:, None]
        ctx.head, ctx.kept, logprob_N = head, kept, chosen_N - log_total_N
        totals = log_total_N, logprob_N, entropy_N, own_ids_Nk, own_others_Nk
        ctx.save_for_backward(hidden_NH, weight_vH, own_N, *totals)
        return logprob_N.clone(), entropy_N.clone() if head.entropy else None, top_Nk, ids_Nk, other_logprobs_Nk

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        head, (hidden_NH, weight_vH, own_N, *totals) = ctx.head, ctx.saved_tensors
        of_logprob_N = torch.zeros_like(totals[1]) if gradients[0] is None else gradients[0]
        wanted = (of_logprob_N, *gradients[1:3], gradients[4])
        scaled = [None if one is None else one / head.temperature for one in wanted]
        gradient = _implementation(hidden_NH, head).Gradient(own_N, head, VocabReductions(*totals), scaled)
        factor_N1 = gradient.factor_N1
        scaled_NH = hidden_NH if factor_N1 is None else (hidden_NH * factor_N1).to(hidden_NH.dtype)
        of_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        of_weight_vH = torch.empty_like(weight_vH) if ctx.needs_input_grad[1] else None
        # A gradient may overwrite its logits.
        kept, ctx.kept = ctx.kept[::-1], []
        for start, slice_sH in _slices(weight_vH):
            of_logits_Ns = gradient.of(kept.pop() if kept else hidden_NH @ slice_sH.T, start)
            if of_hidden_NH.is_cuda:
                # Fused, so the product is not rounded before the sum.
                torch.addmm(of_hidden_NH, of_logits_Ns, slice_sH, out_dtype=torch.float32, out=of_hidden_NH)
            else:
                of_hidden_NH += of_logits_Ns @ slice_sH
            if of_weight_vH is not None:
                torch.mm(of_logits_Ns.T, scaled_NH, out=of_weight_vH[start : start + len(slice_sH)])
        whole_NH = of_hidden_NH if factor_N1 is None else of_hidden_NH * factor_N1
        return whole_NH.to(hidden_NH.dtype), of_weight_vH, None, None, None


def _implementation(hidden_NH: Tensor, head: LMHead) -> Any:
    """Return the module with `Reader` and `Gradient` for these logits."""
    if not hidden_NH.is_cuda or head.soft_cap is not None or head.topk or head.others:
        return vocab_chunks
    from nemo_rl_lite.policy import vocab_chunks_kernel

    return vocab_chunks_kernel


def _slices(weight_vH: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield slices of the vocabulary with the index of their first entry."""
    for start in range(0, len(weight_vH), VOCABULARY_SLICE):
        yield start, weight_vH[start : start + VOCABULARY_SLICE]


def _of_ranks(values: Tensor, head: LMHead) -> list[Tensor]:
    """Gather the values of all ranks that split the vocabulary."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(head.group))]
    dist.all_gather(gathered, values.contiguous(), head.group)
    return gathered
