"""Forward and backward passes over micro-batches through megatron-core's schedules (pipelined or not)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.config.sizes import LOGPROB_CHUNK
from nemo_rl_lite.losses.policy_gradient import Batch
from nemo_rl_lite.observability import progress
from nemo_rl_lite.observability.profiling import span
from nemo_rl_lite.offload import activations
from nemo_rl_lite.policy.megatron.micro_batches import Layout, MicroBatch, cut
from nemo_rl_lite.policy.megatron.model import MegatronModel

# Logprobs [b, T] of a micro-batch and the micro-batch -> its loss and metrics.
MicroBatchLoss = Callable[[Tensor, Batch], tuple[Tensor, Any]]
Before = Callable[[int], None] | None


def forward_logprobs(
    model: MegatronModel,
    tokens_BT: Tensor,
    lengths_B: Tensor,
    layout: Layout,
    temperature: float,
    before: Before = None,
) -> Tensor | None:
    """Logprobs [B, T] of the tokens under the model at `temperature`, on the CPU; None on ranks without logits.

    Entry t is log p(token t | tokens before t); entry 0 and those beyond a sequence's end are 0. `before` is called
    before each micro-batch with the number of those that have not run.
    """
    model.train_mode(False)
    micro_batches = _agreed_cut(model, tokens_BT, lengths_B, layout)

    def score(micro: MicroBatch) -> Callable[..., Tensor]:
        def logprobs(logits: Tensor, non_loss_data: bool) -> Tensor:
            scored = token_logprobs(logits, micro, temperature).cpu()
            # megatron-core's schedule holds them until it has the next micro-batch's: twice the memory, for nothing.
            logits.untyped_storage().resize_(0)
            return scored

        return logprobs

    with torch.no_grad(), activations.suspended(model.chunks):
        parts = _run(model, micro_batches, score, forward_only=True, before=before)
    if not model.place.has_logits:
        return None
    logprobs_BT = torch.zeros(tokens_BT.shape, dtype=torch.float32)
    for micro, part in zip(micro_batches, parts, strict=True):
        logprobs_BT[micro.rows, : micro.width] = part
    return logprobs_BT


def forward_backward(
    model: MegatronModel, batch: Batch, layout: Layout, temperature: float, loss: MicroBatchLoss
) -> list[Any]:
    """Accumulate the gradient of the summed micro-batch losses over all data-parallel ranks; returns the metrics.

    megatron-core divides by the number of micro-batches and averages over data-parallel ranks. Here losses are
    shares of the global loss, so both are multiplied back.
    """
    model.train_mode(True)
    micro_batches = _agreed_cut(model, batch["tokens"], batch["lengths"], layout)
    scale = len(micro_batches) * model.place.data_size

    def on_logits(micro: MicroBatch) -> Callable[..., tuple[Tensor, Any]]:
        own = _rows_of(batch, micro, model.device)

        def scaled_loss(logits: Tensor) -> tuple[Tensor, Any]:
            value, metrics = loss(token_logprobs(logits, micro, temperature), own)
            return value * scale, metrics

        return scaled_loss

    with activations.training_pass(model.chunks, len(micro_batches)):
        return _run(model, micro_batches, on_logits, forward_only=False)


def token_logprobs(logits_nSv: Tensor, micro: MicroBatch, temperature: float) -> Tensor:
    """Logprobs [b, T] of the micro-batch's tokens from this rank's vocabulary slice of the logits, with gradient, in
    float32."""
    logits_Nv, next_N = logits_nSv.flatten(0, 1), micro.tokens_nS.roll(-1, dims=1).flatten()
    if torch.is_grad_enabled():
        return micro.unpack(_next_token_logprobs(logits_Nv, next_N, temperature))
    # Without a gradient nothing large need be kept: float32 logits exist for a few tokens at a time.
    chunks = zip(logits_Nv.split(LOGPROB_CHUNK), next_N.split(LOGPROB_CHUNK), strict=True)
    return micro.unpack(torch.cat([_next_token_logprobs(*chunk, temperature) for chunk in chunks]))


def _next_token_logprobs(logits_Nv: Tensor, next_N: Tensor, temperature: float) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # A copy in any case: the cross entropy works in place.
    scaled_Nv = logits_Nv.to(torch.float32, copy=True)
    if temperature != 1:
        scaled_Nv = scaled_Nv.div_(temperature)
    return -vocab_parallel_cross_entropy(scaled_Nv, next_N)


def _agreed_cut(model: MegatronModel, tokens_BT: Tensor, lengths_B: Tensor, layout: Layout) -> list[MicroBatch]:
    """This replica's micro-batches, as many as on every other: expert-parallel collectives come once a micro-batch."""
    micro_batches = cut(tokens_BT, lengths_B, layout)
    if model.place.data_size > 1 and layout.mode != "fixed":
        most = torch.tensor(len(micro_batches), device=model.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if len(micro_batches) < most:
            micro_batches = cut(tokens_BT, lengths_B, layout, at_least=int(most))
        if len(micro_batches) != most:
            raise RuntimeError(f"{len(lengths_B)} sequences make {len(micro_batches)} micro-batches, not {int(most)}")
    return micro_batches


def _run(
    model: MegatronModel,
    micro_batches: Sequence[MicroBatch],
    on_logits: Callable[[MicroBatch], Callable[..., Any]],
    forward_only: bool,
    before: Before = None,
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    # megatron-core would make all logits float32 at once.
    options = {"fp32_output": False} if model.half_precision else {}

    def step(own: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        host = next(own)
        micro = host.to(model.device)
        positions = host.positions().to(model.device)
        return chunk(micro.tokens_nS, positions, **options, **_attention(host, model.device)), on_logits(micro)

    first = micro_batches[0].tokens_nS
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=_announced(micro_batches, before),
        model=model.chunks,
        num_microbatches=len(micro_batches),
        seq_length=first.shape[1],
        micro_batch_size=first.shape[0],
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _announced(micro_batches: Sequence[MicroBatch], before: Before) -> Iterator[MicroBatch]:
    for index, micro in enumerate(micro_batches):
        progress.note(micro_batch=index + 1)
        if before is not None:
            before(len(micro_batches) - index)
        # Until the schedule asks for the next: with pipelining, what else it does meanwhile is in it.
        with span(f"micro-batch {index + 1}"):
            yield micro


def _attention(micro: MicroBatch, device: torch.device) -> dict[str, Any]:
    """What tells the model which tokens see which: a mask on a CPU, sequence boundaries for Transformer Engine, which
    is causal by itself and needs nothing where right-padded sequences have a row each."""
    if device.type == "cpu":
        return {"attention_mask": micro.hidden_from()}
    if not micro.packed:
        return {"attention_mask": None}
    from megatron.core.packed_seq_params import PackedSeqParams

    boundaries = micro.boundaries()
    longest = int(boundaries.diff().max())
    boundaries = boundaries.to(device)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return {"attention_mask": None, "packed_seq_params": params}


def _rows_of(batch: Batch, micro: MicroBatch, device: torch.device) -> Batch:
    """The micro-batch's rows of everything in the batch, cut to its width."""
    return {
        name: (values[micro.rows, : micro.width] if values.dim() == 2 else values[micro.rows]).to(device)
        for name, values in batch.items()
    }
