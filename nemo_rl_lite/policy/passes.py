"""Forward and backward passes over micro-batches, through megatron-core's schedules (pipelined or not)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import Loss, Normalizers
from nemo_rl_lite.policy import activation_offload
from nemo_rl_lite.policy.context import Shard
from nemo_rl_lite.policy.graphs import MicroBatchGraphs
from nemo_rl_lite.policy.logprobs import TopLogits, scores_of
from nemo_rl_lite.policy.micro_batches import Layout, ModelInput, cut, sent_together
from nemo_rl_lite.policy.micro_pass import Before, Pace, Trained, announced, forward, rows_of, trained_on, view_of
from nemo_rl_lite.policy.model import MegatronModel

Last = tuple[Callable[..., dict[str, Tensor]], Callable[..., Any]]
"""The last stage's functions for a micro-batch: `scores_of` it, and the function of these scores."""


def forward_scores(
    model: MegatronModel,
    tokens_BT: Tensor,
    lengths_B: Tensor,
    layout: Layout,
    temperature: float,
    before: Before = None,
    loss: Loss | TopLogits | None = None,
    experts_BTLk: Tensor | None = None,
) -> dict[str, Tensor] | None:
    """`logprobs` [B, T] of the tokens under the model at `temperature` and, under the names of `Batch`'s fields, what
    `loss` needs besides, all on the CPU. None on ranks without logits.

    Entry t is log p(token t | tokens before t); entry 0 and those beyond a sequence's end are 0. `before`: see
    `Before`. `experts_BTLk`: see `Batch.routed_experts`.
    """
    model.train_mode(False)
    micro_batches = _agreed_cut(model, tokens_BT, lengths_B, layout)
    model.clock.begin()
    pace = Pace(model.device)

    def score(shard: Shard) -> Last:
        def on_host(scores: dict[str, Tensor], non_loss_data: bool) -> dict[str, Tensor]:
            copies = {name: values.to("cpu", non_blocking=True) for name, values in scores.items()}
            if before is not None:
                pace.keep()
            return copies

        return scores_of(shard, temperature, loss, model.gather.wait_for), on_host

    with torch.no_grad(), activation_offload.suspended(model.chunks):
        parts = _run(model, micro_batches, score, experts_BTLk, forward_only=True, before=before, pace=pace)
    model.clock.end()
    if not model.place.has_logits:
        return None
    if model.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    whole = {
        name: torch.zeros((*tokens_BT.shape, *values.shape[2:]), dtype=values.dtype)
        for name, values in parts[0].items()
    }
    for micro, part in zip(micro_batches, parts, strict=True):
        for name, values in part.items():
            # A bucket has rows and columns that the batch does not have.
            whole[name][micro.rows, : micro.width] = values[: len(micro.rows), : tokens_BT.shape[1]]
    return whole


def forward_backward(
    model: MegatronModel,
    batch: Batch,
    layout: Layout,
    temperature: float,
    loss: Loss,
    counts: Normalizers,
    mismatch_counts: Normalizers | None = None,
    graphs: MicroBatchGraphs | None = None,
) -> list[Trained]:
    """Accumulate the gradient of the summed micro-batch losses over all data-parallel ranks; returns measurements.

    With `mismatch_counts`, the policy has not moved since it sampled: its previous logprobs are those of this pass, so
    that importance ratios are exactly 1 (`force_on_policy_ratio` of NeMo-RL), and the engines' are compared with them.

    megatron-core divides by the number of micro-batches and averages over data-parallel ranks. Here losses are
    shares of the global loss, so both are multiplied back. It also averages over context-parallel ranks, each of which
    has the gradient of its own positions, and multiplies that back itself. `graphs` run the micro-batches where there
    are any.
    """
    model.train_mode(True)
    experts_BTLk, batch = batch.routed_experts, replace(batch, routed_experts=None)
    micro_batches = _agreed_cut(model, batch.tokens, batch.lengths, layout)
    model.clock.begin()
    if graphs is not None:
        return graphs.forward_backward(micro_batches, batch, temperature, loss, counts, mismatch_counts)
    scale = len(micro_batches) * model.place.data_size

    def train(shard: Shard) -> Last:
        own = rows_of(shard.micro, batch)
        own = replace(own, **sent_together(own.present(), model.device))

        def scaled_loss(scores: dict[str, Tensor]) -> tuple[Tensor, Trained]:
            value, trained = trained_on(scores, own, loss, counts, mismatch_counts)
            return value * scale, trained

        wait_for, ids = model.gather.wait_for, own.teacher_topk_ids
        return scores_of(shard, temperature, loss, wait_for, ids, model.keep_logits), scaled_loss

    with activation_offload.training_pass(model.chunks, len(micro_batches)):
        return _run(model, micro_batches, train, experts_BTLk, forward_only=False)


def _agreed_cut(model: MegatronModel, tokens_BT: Tensor, lengths_B: Tensor, layout: Layout) -> list[ModelInput]:
    """Cut into the same number of micro-batches on every replica, because each has expert-parallel collectives."""
    micro_batches = cut(tokens_BT, lengths_B, layout)
    if model.place.data_size > 1 and layout.mode != "fixed":
        most = torch.tensor(len(micro_batches), device=model.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        wanted = int(most)
        if len(micro_batches) < wanted:
            micro_batches = cut(tokens_BT, lengths_B, layout, at_least=wanted)
        if len(micro_batches) != wanted:
            raise RuntimeError(f"{len(lengths_B)} sequences make {len(micro_batches)} micro-batches, not {wanted}")
    return micro_batches


def _run(
    model: MegatronModel,
    micro_batches: Sequence[ModelInput],
    last: Callable[[Shard], Last],
    experts_BTLk: Tensor | None,
    forward_only: bool,
    before: Before = None,
    pace: Pace | None = None,
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(own: Iterator[ModelInput], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        host = next(own)
        if model.replay is not None:
            model.replay.begin(host, experts_BTLk, trains=not forward_only)
        shard = Shard.of(host, model.context, model.device)
        seen = sent_together(view_of(host, model.device, model.context), model.device)
        scores, on_scores = last(shard)
        return forward(model, chunk, shard.tokens_nS, seen, host.longest, scores), on_scores

    first = micro_batches[0].tokens_nS
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=announced(micro_batches, before, pace),
        model=model.chunks,
        num_microbatches=len(micro_batches),
        seq_length=first.shape[1],
        micro_batch_size=first.shape[0],
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
