"""The parts of a forward and backward pass over one micro-batch, common to schedules and CUDA graphs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.grpo import mismatch_metrics
from nemo_rl_lite.losses.interface import Loss, Metrics, Normalizers, loss_of
from nemo_rl_lite.observability.liveness import note_progress
from nemo_rl_lite.observability.profiling import span
from nemo_rl_lite.policy.context import ContextRanks
from nemo_rl_lite.policy.micro_batches import ModelInput
from nemo_rl_lite.policy.model import MegatronModel

Before = Callable[[int, int], None] | None
"""Called before each micro-batch, with the numbers of micro-batches that have not begun and that may still run."""


@dataclass(frozen=True)
class Trained:
    """A training pass's metrics of its loss, and its `mismatch_metrics` where it compares with the engines. Each is a
    share of the global batch's."""

    metrics: Metrics
    mismatch: Metrics


class Pace:
    """Keeps the host at most one micro-batch ahead of the device, so that it knows the device's progress. The last
    pipeline stage calls it; on other stages megatron-core waits for the device at each send."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._last: torch.cuda.Event | None = None

    def keep(self) -> None:
        """Call this after a micro-batch has been launched: waits until the one before has run."""
        if not self._on_gpu:
            return
        launched = torch.cuda.Event(blocking=True)
        launched.record()
        if self._last is not None:
            self._last.synchronize()
        self._last = launched

    @property
    def running(self) -> int:
        """How many of the launched micro-batches may still run."""
        return int(self._last is not None and not self._last.query())


def announced(
    micro_batches: Sequence[ModelInput], before: Before = None, pace: Pace | None = None
) -> Iterator[ModelInput]:
    for index, micro in enumerate(micro_batches):
        note_progress(micro_batch=index + 1)
        if before is not None:
            before(len(micro_batches) - index, pace.running if pace else 0)
        # The span lasts until the schedule asks for the next micro-batch; with pipelining it covers other work too.
        with span(f"micro-batch {index + 1}"):
            yield micro


def rows_of(micro: ModelInput, batch: Batch) -> Batch:
    """The micro-batch's rows of a batch, cut to its longest; in a bucket, padded to the bucket's rows and width."""
    own = batch.rows(micro.rows, micro.width)
    return own if micro.bucket is None else own.padded_to(micro.bucket.rows, micro.bucket.width)


def trained_on(
    scores: dict[str, Tensor], own: Batch, loss: Loss, counts: Normalizers, mismatch_counts: Normalizers | None
) -> tuple[Tensor, Trained]:
    """The loss of a micro-batch, with gradient, from its `scores_of`, and its metrics."""
    logprobs_BT = scores.pop("logprobs")
    whole, mismatch = replace(own, **scores), {}
    if mismatch_counts is not None:
        whole = replace(whole, previous_logprobs=logprobs_BT.detach())
        mismatch = mismatch_metrics(whole, mismatch_counts)
    value, metrics = loss_of(loss, logprobs_BT, whole, counts)
    return value, Trained(metrics, mismatch)


def view_of(micro: ModelInput, device: torch.device, context: ContextRanks) -> dict[str, Tensor]:
    """Host tensors of each token's place and visible tokens: `positions`, and a mask on a CPU, or sequence boundaries
    of packs for Transformer Engine, which is causal by itself. Mask and boundaries are those of the whole row, also
    where this rank has a part of it."""
    seen = {"positions": context.own(micro.positions(), micro)}
    if device.type == "cpu":
        return seen | {"attention_mask": micro.hidden_from()}
    return seen | ({"boundaries": micro.boundaries()} if micro.packed else {})


def forward(
    model: MegatronModel,
    chunk: Any,
    tokens_nS: Tensor,
    seen: dict[str, Tensor],
    longest: int,
    scores: Callable[..., dict[str, Tensor]],
) -> Any:
    """The output of a stage. `seen`: `view_of` the micro-batch, whose longest sequence has `longest` tokens."""
    # megatron-core would make a stage's output float32.
    options: dict[str, Any] = {"fp32_output": False} if model.half_precision else {}
    if "boundaries" in seen:
        from megatron.core.packed_seq_params import PackedSeqParams

        padded = seen["boundaries"] if model.context.splits else None
        options["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=seen["boundaries"],
            cu_seqlens_kv=seen["boundaries"],
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            # Required where ranks share sequences. A sequence's own padding is part of it here, which saves a
            # comparison on the GPU in each layer.
            cu_seqlens_q_padded=padded,  # pyrefly: ignore
            cu_seqlens_kv_padded=padded,  # pyrefly: ignore
            pad_between_seqs=False,
        )
    mask = seen.get("attention_mask")
    return chunk(tokens_nS, seen["positions"], attention_mask=mask, output_processor=scores, **options)
