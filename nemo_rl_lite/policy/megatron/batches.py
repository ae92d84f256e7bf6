"""Forward and backward passes over micro-batches through megatron-core's schedules (pipelined or not)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.algorithms.losses import Batch
from nemo_rl_lite.policy.megatron.model import MegatronModel

# Logprobs [b, T] of a micro-batch and the micro-batch -> its loss and metrics.
MicroBatchLoss = Callable[[Tensor, Batch], tuple[Tensor, Any]]


def forward_logprobs(model: MegatronModel, tokens_BT: Tensor, micro_batch: int, temperature: float) -> Tensor | None:
    """Logprobs [B, T] of the tokens under the model at `temperature`; None on ranks without logits.

    Entry t is log p(token t | tokens before t); entry 0 is 0.
    """
    model.train_mode(False)
    with torch.no_grad():
        parts = _run(
            model,
            {"tokens": tokens_BT},
            micro_batch,
            lambda micro: lambda logits, non_loss_data: token_logprobs(logits, micro["tokens"], temperature),
            forward_only=True,
        )
    return torch.cat(parts) if model.place.has_logits else None


def forward_backward(
    model: MegatronModel, batch: Batch, micro_batch: int, temperature: float, loss: MicroBatchLoss
) -> list[Any]:
    """Accumulate the gradient of the summed micro-batch losses over all data-parallel ranks; returns the metrics.

    megatron-core divides by the number of micro-batches and averages over data-parallel ranks. Here losses are
    shares of the global loss, so both are multiplied back.
    """
    model.train_mode(True)
    rows = batch["tokens"].shape[0]
    scale = rows // micro_batch * model.place.data_size

    def scaled_loss(logits: Tensor, micro: Batch) -> tuple[Tensor, Any]:
        value, metrics = loss(token_logprobs(logits, micro["tokens"], temperature), micro)
        return value * scale, metrics

    return _run(model, batch, micro_batch, lambda micro: partial(scaled_loss, micro=micro), forward_only=False)


def token_logprobs(logits_BTv: Tensor, tokens_BT: Tensor, temperature: float) -> Tensor:
    """Logprobs [B, T] of `tokens_BT` from this rank's vocabulary slice of the logits, with gradient, in float32."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    next_tokens_BT = tokens_BT.roll(-1, dims=1)
    # A copy in any case: the cross entropy works in place.
    logprobs_BT = -vocab_parallel_cross_entropy(logits_BTv.float() / temperature, next_tokens_BT)
    return torch.cat([torch.zeros_like(logprobs_BT[:, :1]), logprobs_BT[:, :-1]], dim=1)


def _run(
    model: MegatronModel,
    batch: Batch,
    micro_batch: int,
    on_logits: Callable[[Batch], Callable[..., Any]],
    forward_only: bool,
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rows, length = batch["tokens"].shape
    if rows % micro_batch:
        raise ValueError(f"{rows} sequences do not divide into micro-batches of {micro_batch}")
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    positions = torch.arange(length).expand(micro_batch, -1)

    def step(micro_batches: Iterator[Batch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        micro = next(micro_batches)
        return chunk(micro["tokens"], positions, mask), on_logits(micro)

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=_slices(batch, micro_batch),
        model=model.chunks,
        num_microbatches=rows // micro_batch,
        seq_length=length,
        micro_batch_size=micro_batch,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _slices(batch: Batch, size: int) -> Iterator[Batch]:
    for start in range(0, batch["tokens"].shape[0], size):
        yield {name: values[start : start + size] for name, values in batch.items()}
