"""Forward and backward passes over micro-batches, with megatron-core's schedules. `graphs.py` runs them as graphs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.losses.batch import Batch, RoutedExperts
from nemo_rl_lite.losses.grpo import mismatch_metrics
from nemo_rl_lite.losses.interface import Loss, Metrics, Normalizers, loss_of, needs_of
from nemo_rl_lite.observability.liveness import note_progress
from nemo_rl_lite.observability.profiling import span
from nemo_rl_lite.policy import activation_offload
from nemo_rl_lite.policy.context import ContextRanks, Shard, cut_by_length
from nemo_rl_lite.policy.logprobs import TopLogits, scores_of
from nemo_rl_lite.policy.micro_batches import Layout, ModelInput, cut, round_up, sent_together
from nemo_rl_lite.policy.model import MegatronModel
from nemo_rl_lite.policy.shared_prompts import SharedKeys

Before = Callable[[int, int], None] | None
"""Called before each micro-batch with the number of micro-batches that have not started, and that are in flight."""

LastStage = tuple[Callable[..., dict[str, Tensor]], Callable[..., Any]]
"""Functions of the last stage for a micro-batch: its `scores_of`, and a function of these scores."""


@dataclass(frozen=True)
class Trained:
    """Metrics of a micro-batch's training pass: of the loss, and `mismatch_metrics` if it measures them. Each is a
    share of the global batch's."""

    rows: Tensor
    """Indices of the sequences in the batch, on the host."""
    metrics: Metrics
    mismatch: Metrics
    scores: Mapping[str, Tensor]
    """The pass's `logprobs` and, if the loss needs it, `entropy`, [b, T]; in a bucket, padded to the bucket."""
    saved: float = 0.0
    """See `ModelInput.saved`."""

    def on_host(self) -> "Trained":
        metrics, mismatch, scores = (
            {name: value.detach().cpu() for name, value in values.items()}
            for values in (self.metrics, self.mismatch, self.scores)
        )
        return replace(self, metrics=metrics, mismatch=mismatch, scores=scores)


class Pace:
    """Keeps the host at most one micro-batch ahead of the device, so that it knows the device's progress. For the last
    pipeline stage; in others megatron-core synchronizes at each send."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._last: torch.cuda.Event | None = None

    def keep(self) -> None:
        """Wait for the micro-batch before the one just launched."""
        if not self._on_gpu:
            return
        launched = torch.cuda.Event(blocking=True)
        launched.record()
        if self._last is not None:
            self._last.synchronize()
        self._last = launched

    def running(self) -> int:
        """Return the number of micro-batches in flight."""
        return int(self._last is not None and not self._last.query())


def forward_scores(
    model: MegatronModel,
    tokens_BT: Tensor,
    lengths_B: Tensor,
    layout: Layout,
    temperature: float,
    before: Before = None,
    loss: Loss | TopLogits | None = None,
    experts: RoutedExperts | None = None,
) -> dict[str, Tensor] | None:
    """Return `logprobs` [B, T] at `temperature`, and the other scores that `loss` needs by `Batch`'s field names, on
    the CPU; None on ranks without logits.

    Entry t is log p(token t | tokens before t); entry 0 and entries beyond a sequence's end are 0. `experts`: routed
    experts of the rank's layers.
    """
    model.train_mode(False)
    micro_batches = cut_batch(model, tokens_BT, lengths_B, layout)
    model.clock.begin()
    pace = Pace(model.device)

    def score(shard: Shard) -> LastStage:
        def on_host(scores: dict[str, Tensor], non_loss_data: bool) -> dict[str, Tensor]:
            copies = {name: values.to("cpu", non_blocking=True) for name, values in scores.items()}
            if before is not None:
                pace.keep()
            return copies

        return scores_of(shard, temperature, loss, model.gather.wait_for), on_host

    with torch.no_grad(), activation_offload.suspended(model.chunks):
        parts = _run(model, announced(micro_batches, before, pace), micro_batches, score, experts, trains=False)
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
        for name, values in part.items() if model.context.reports(micro) else ():
            put_rows(whole[name], micro.rows, values)
    for values_BT in whole.values():
        model.context.complete(values_BT, model.device)
    return whole


def put_rows(whole_BT: Tensor, rows: Tensor, values_bT: Tensor) -> None:
    """Copy the values of a micro-batch to its rows of a batch. A bucket has more rows and columns."""
    whole_BT[rows, : values_bT.shape[1]] = values_bT[: len(rows), : whole_BT.shape[1]]


def forward_backward(
    model: MegatronModel,
    batch: Batch,
    layout: Layout,
    temperature: float,
    loss: Loss,
    counts: Normalizers,
    mismatch_counts: Normalizers | None = None,
    experts: RoutedExperts | None = None,
) -> list[Trained]:
    """Accumulate the gradient of the summed micro-batch losses over all data-parallel ranks. Returns the metrics of
    each micro-batch of the replica, in the micro-batches' order.

    `mismatch_counts` means that the policy has not changed since sampling. Then this pass's logprobs are the previous
    ones: importance ratios are exactly 1 (NeMo-RL's `force_on_policy_ratio`), and they are compared with the engines'.

    megatron-core divides by the number of micro-batches and averages over data-parallel ranks. Losses here are shares
    of the global loss, so both are multiplied back. For context-parallel ranks, megatron-core does so itself.
    """
    model.train_mode(True)
    if "student_topk_logprobs" in needs_of(loss):
        # The teacher's largest logits of a shared token may differ by row.
        layout = replace(layout, least_saved=None)
    micro_batches = cut_batch(model, batch.tokens, batch.lengths, layout)
    model.clock.begin()
    scale = len(micro_batches) * model.place.data_size

    def train(shard: Shard) -> LastStage:
        own = rows_of(shard.micro, batch)
        own = replace(own, **sent_together(own.present(), model.device))

        def scaled_loss(scores: dict[str, Tensor]) -> tuple[Tensor, Trained]:
            value, trained = trained_on(scores, shard.micro.rows, own, loss, counts, mismatch_counts)
            return value * (0 if shard.micro.is_filler else scale), trained

        wait_for, ids = model.gather.wait_for, own.teacher_topk_ids
        return scores_of(shard, temperature, loss, wait_for, ids, model.keep_logits), scaled_loss

    with activation_offload.training_pass(model.chunks, len(micro_batches) * len(model.chunks)):
        trained = _run(model, announced(micro_batches), micro_batches, train, experts, trains=True)
    # None on other stages.
    done = [
        replace(one, saved=micro.saved(model.cost))
        for micro, one in zip(micro_batches, trained, strict=False)
        if model.context.reports(micro)
    ]
    if not model.context.by_length or not model.place.has_logits:
        return done
    return model.context.joined([one.on_host() for one in done])


def cut_batch(model: MegatronModel, tokens_BT: Tensor, lengths_B: Tensor, layout: Layout) -> list[ModelInput]:
    """Split into a multiple of `model.multiple` micro-batches. Replicas of a model with experts make the same number,
    because each micro-batch has collectives of expert-parallel ranks. Fillers complete it if there are too few
    sequences."""
    cut_own = partial(cut, tokens_BT, lengths_B, layout)
    if layout.whole is not None:
        cut_own = partial(cut_by_length, tokens_BT, lengths_B, layout, layout.whole, model.context, model.cost)
    micro_batches = cut_own()
    wanted = len(micro_batches)
    if model.place.data_size > 1 and model.chunks[0].config.num_moe_experts:
        most = torch.tensor(wanted, device=model.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        wanted = int(most)
    wanted = round_up(wanted, model.multiple)
    if len(micro_batches) < wanted:
        micro_batches = cut_own(at_least=wanted)
        # Context-parallel ranks all take a shared one, or each a whole one.
        shortest = min(micro_batches, key=lambda micro: (micro.piece, micro.tokens_nS.numel()))
        micro_batches += [replace(shortest, is_filler=True)] * (wanted - len(micro_batches))
    return micro_batches


def announced(
    micro_batches: Sequence[ModelInput], before: Before = None, pace: Pace | None = None
) -> Iterator[ModelInput]:
    """Yield micro-batches, and report each to heartbeat, profiler and `before`."""
    for index, micro in enumerate(micro_batches):
        note_progress(micro_batch=index + 1)
        if before is not None:
            before(len(micro_batches) - index, pace.running() if pace else 0)
        # The span ends at the schedule's next request; with pipelining, it includes other work.
        with span(f"micro-batch {index + 1}"):
            yield micro


def _run(
    model: MegatronModel,
    feed: Iterator[ModelInput],
    micro_batches: Sequence[ModelInput],
    last: Callable[[Shard], LastStage],
    experts: RoutedExperts | None,
    trains: bool,
) -> list[Any]:
    """Run megatron-core's schedule on the micro-batches of `feed`."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(own: Iterator[ModelInput], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        host = next(own)
        if model.replay is not None:
            model.replay.begin(host, experts, trains, model.chunks.index(chunk))
        shard = Shard.of(host, model.context.of(host), model.device)
        seen = sent_together(view_of(host, model.device, shard.context), model.device)
        scores, on_scores = last(shard)
        return forward(model, chunk, shard, seen, host.longest, scores), on_scores

    first = micro_batches[0].tokens_nS
    return get_forward_backward_func()(
        forward_step_func=step,
        # Each chunk of interleaved stages reads all micro-batches. The first one is announced.
        data_iterator=[feed, *(iter(micro_batches) for _ in model.chunks[1:])] if len(model.chunks) > 1 else feed,
        model=model.chunks,
        num_microbatches=len(micro_batches),
        seq_length=first.shape[1],
        micro_batch_size=first.shape[0],
        forward_only=not trains,
        collect_non_loss_data=not trains,
    )


def rows_of(micro: ModelInput, batch: Batch) -> Batch:
    """Return the micro-batch's rows of a batch at its width; in a bucket, padded to the bucket."""
    own = batch.rows(micro.rows, micro.width)
    return own if micro.bucket is None else own.padded_to(micro.bucket.rows, micro.bucket.width)


def trained_on(
    scores: dict[str, Tensor],
    rows: Tensor,
    own: Batch,
    loss: Loss,
    counts: Normalizers,
    mismatch_counts: Normalizers | None,
) -> tuple[Tensor, Trained]:
    """Return a micro-batch's loss, with gradient, and metrics, from its `scores_of`. `own`: its rows of a batch."""
    logprobs_bT = scores.pop("logprobs")
    whole, mismatch = replace(own, **scores), {}
    kept = {"logprobs": logprobs_bT} | {name: values for name, values in scores.items() if name == "entropy"}
    kept = {name: values.detach() for name, values in kept.items()}
    if mismatch_counts is not None:
        whole = replace(whole, previous_logprobs=kept["logprobs"])
        mismatch = mismatch_metrics(whole, mismatch_counts)
    value, metrics = loss_of(loss, logprobs_bT, whole, counts)
    return value, Trained(rows, metrics, mismatch, kept)


def view_of(micro: ModelInput, device: torch.device, context: ContextRanks) -> dict[str, Tensor]:
    """Return host tensors: `positions`, and `attention_mask` on a CPU, or `boundaries` of packed sequences for
    Transformer Engine's causal attention. Mask and boundaries are of the whole row, on context-parallel ranks too. With
    shared prefixes also `keys`, and their `key_boundaries`."""
    seen, shares = {"positions": context.own(micro.positions(), micro)}, micro.prefixes is not None
    if shares:
        seen["keys"] = micro.keys()
    if device.type == "cpu":
        return seen | {"attention_mask": micro.hidden_from()}
    if shares:
        seen["key_boundaries"] = micro.key_boundaries()
    return seen | ({"boundaries": micro.boundaries()} if micro.packed else {})


def forward(
    model: MegatronModel,
    chunk: Any,
    shard: Shard,
    seen: dict[str, Tensor],
    longest: tuple[int, int],
    scores: Callable[..., dict[str, Tensor]],
) -> Any:
    """Return the output of a stage. `seen`: `view_of` the micro-batch. `longest`: `ModelInput.longest`."""
    # megatron-core would convert the output to float32.
    options: dict[str, Any] = {"fp32_output": False} if model.half_precision else {}
    if "keys" in seen:
        boundaries = seen.get("boundaries"), seen.get("key_boundaries")
        options["packed_seq_params"] = SharedKeys(seen["positions"][0], seen["keys"], *longest, *boundaries)
    elif "boundaries" in seen:
        from megatron.core.packed_seq_params import PackedSeqParams

        padded = seen["boundaries"] if shard.context.splits else None
        options["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=seen["boundaries"],
            cu_seqlens_kv=seen["boundaries"],
            max_seqlen_q=longest[0],
            max_seqlen_kv=longest[1],
            # Context parallelism requires these. Padding is part of its sequence here, which saves a comparison on the
            # GPU in each layer.
            cu_seqlens_q_padded=padded,  # pyrefly: ignore
            cu_seqlens_kv_padded=padded,  # pyrefly: ignore
            pad_between_seqs=False,
            cp_group=shard.context.group if model.context.by_length else None,  # pyrefly: ignore
        )
    mask = seen.get("attention_mask")
    return chunk(shard.tokens_nS, seen["positions"], attention_mask=mask, output_processor=scores, **options)
