"""Context parallelism: the ranks of a group split sequences, in Transformer Engine's order.

With c ranks, each packed sequence is split into 2 c chunks. Rank r has chunks r and 2 c - 1 - r, which balances causal
attention. Scores are gathered with their gradient, so losses see whole sequences.

With `hybrid_context_parallel` (Megatron's name), the ranks split only long sequences. Packs of others are whole on one
rank, as if ranks were replicas. This saves padding, communication and small kernels. All ranks make the same number of
micro-batches, shared ones first, because experts may be spread over them.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate, batched
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.policy.balance import split_longest
from nemo_rl_lite.policy.micro_batches import Cost, Layout, ModelInput, cut, sent_together

# Bytes per exchange of scores.
_SENT = 64 * 2**20


@dataclass(frozen=True)
class ContextRanks:
    """This rank among the `size` ranks that share sequences; `group` is None for one rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    alone: dist.ProcessGroup | None = None
    """Group of this rank only, for micro-batches that it has whole; None if the ranks share all."""

    @property
    def splits(self) -> bool:
        """True if a rank has only a part of each sequence."""
        return self.size > 1

    @property
    def by_length(self) -> bool:
        """True if single ranks have micro-batches of short sequences whole."""
        return self.alone is not None

    def of(self, micro: ModelInput) -> "ContextRanks":
        """Return the ranks that share a micro-batch."""
        return self if self.alone is None or micro.piece > 1 else ContextRanks(group=self.alone)

    def reports(self, micro: ModelInput) -> bool:
        """Return whether this rank's results of a micro-batch are used. If single ranks have some, those of others are
        `joined`."""
        return not micro.is_filler and (not self.by_length or self.of(micro).rank == 0)

    def joined(self, results: list[Any]) -> list[Any]:
        """Return the results of all ranks, without GPU tensors. Collective."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, results, self.group)
        return [one for own in found for one in own]

    def complete(self, values_BT: Tensor, device: torch.device) -> None:
        """Fill in the rows that other ranks have, and that are 0 here. `values_BT` is on the host. Collective."""
        for rows in values_BT.split(max(1, _SENT // max(1, values_BT[:1].nbytes))) if self.by_length else ():
            sent = rows.to(device)
            dist.all_reduce(sent, group=self.group)
            rows.copy_(sent)

    def own(self, values_nS: Tensor, micro: ModelInput) -> Tensor:
        """Return this rank's part of host values by position in a micro-batch: [n, S] -> [n, S / c]."""
        return values_nS[:, own_places(micro.pieces, self.rank, self.size)] if self.splits else values_nS


@dataclass(frozen=True)
class Shard:
    """Part of a micro-batch on one rank: n rows of S / c tokens, on the model's device."""

    tokens_nS: Tensor
    next_tokens_nS: Tensor
    """Next token of each; another rank may have it."""
    micro: ModelInput
    """Whole micro-batch."""
    context: ContextRanks = field(default_factory=ContextRanks)
    order: Tensor | None = None
    """Index [N] of each position of the whole row in the gathered positions of all ranks; None for one rank."""

    @classmethod
    def of(cls, micro: ModelInput, context: ContextRanks, device: torch.device) -> "Shard":
        """Return this rank's part of a micro-batch on the host; it is packed if several ranks share it."""
        if not context.splits:
            return replace(cls.whole(micro.to(device)), context=context)
        places = torch.cat([own_places(micro.pieces, rank, context.size) for rank in range(context.size)])
        own = {
            "tokens_nS": context.own(micro.tokens_nS, micro),
            "next_tokens_nS": context.own(micro.tokens_nS.roll(-1, dims=1), micro),
            "order": places.argsort(),
        }
        return cls(micro=micro.to(device), context=context, **sent_together(own, device))

    @classmethod
    def whole(cls, micro: ModelInput) -> "Shard":
        return cls(micro.tokens_nS, micro.tokens_nS.roll(-1, dims=1), micro)

    def unpack(self, of_next_M: Tensor) -> Tensor:
        """Return `ModelInput.unpack` of the whole micro-batch, [b, width, ...], on every rank. Collective.

        `of_next_M`: values [M, ...] of the next token at this rank's positions. All ranks compute the same loss.
        Backward gives each rank the gradient of its values, and megatron-core sums the contributions.
        """
        if self.order is None:
            return self.micro.unpack(of_next_M)
        return self.micro.unpack(_Gathered.apply(of_next_M, self.context)[self.order])

    def pack(self, of_token_bTk: Tensor) -> Tensor:
        """Return this rank's part [M, k] of `ModelInput.pack`."""
        packed_Nk = self.micro.pack(of_token_bTk)
        if self.order is None:
            return packed_Nk
        return packed_Nk[self.order.argsort().chunk(self.context.size)[self.context.rank]]


def cut_by_length(
    tokens_BT: Tensor,
    lengths_B: Tensor,
    layout: Layout,
    whole: Layout,
    context: ContextRanks,
    cost: Cost,
    at_least: int = 1,
) -> list[ModelInput]:
    """Split right-padded sequences into packs that the ranks share, then packs that this rank has in the layout
    `whole`.

    The ranks share sequences that do not fit one rank, and others as `split_longest` chooses. All ranks have the same
    number of packs: `at_least` many, if there are enough sequences. Fillers are the last.
    """
    lengths = lengths_B.tolist()
    groups = [*batched(range(len(lengths)), layout.together)]
    costs = [sum(cost(lengths[row]) for row in rows) for rows in groups]
    too_long = [sum(lengths[row] for row in rows) > whole.size for rows in groups]
    shared, of_ranks = split_longest(costs, context.size, too_long)

    def packs(chosen: Sequence[int], layout: Layout, at_least: int = 1) -> list[ModelInput]:
        rows = torch.tensor([row for group in chosen for row in groups[group]])
        own = cut(tokens_BT[rows], lengths_B[rows], layout, at_least)
        return [replace(micro, rows=rows[micro.rows]) for micro in own]

    if not any(of_ranks):
        return packs(shared, layout, at_least)
    first = packs(shared, layout) if shared else []
    most = max(at_least - len(first), *(len(packs(own, whole)) for own in of_ranks if own))
    own = packs(of_ranks[context.rank], whole, most) if of_ranks[context.rank] else []
    (filler,) = packs([min(range(len(groups)), key=lambda group: sum(lengths[row] for row in groups[group]))], whole)
    return [*first, *own, *[replace(filler, is_filler=True)] * (most - len(own))]


def follow_groups(chunks: Sequence[Any]) -> None:
    """Let the attention of a model rotate queries and keys by the ranks that share the micro-batch.

    megatron-core gives Transformer Engine `PackedSeqParams.cp_group`, but rotates by the group of the layer. Raises
    TrainingError: the model has other layers, which may communicate.
    """
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.utils import unwrap_model

    for chunk in map(unwrap_model, chunks):
        layers: list[Any] = [getattr(layer, "self_attention", None) for layer in chunk.decoder.layers]
        if any(type(one) is not SelfAttention for one in layers) or chunk.position_embedding_type == "mrope":
            raise TrainingError(
                "policy.megatron_cfg.hybrid_context_parallel: needs standard attention in all layers, with rotary "
                "embeddings of one position; set policy.megatron_cfg.hybrid_context_parallel=false"
            )
        for attention in layers:
            attention.register_forward_pre_hook(_follow_group, with_kwargs=True)


def _follow_group(attention: Any, _: Any, options: dict[str, Any]) -> None:
    attention.pg_collection = copy(attention.pg_collection)
    attention.pg_collection.cp = options["packed_seq_params"].cp_group


def own_places(pieces: Sequence[int], rank: int, size: int) -> Tensor:
    """Return the places in a row of the tokens of `rank`, in its order. `pieces`: tokens of each sequence, multiples of
    2 `size`; else raises ValueError."""
    if any(piece % (2 * size) for piece in pieces):
        raise ValueError(f"{size} context-parallel ranks cannot share sequences of {list(pieces)} tokens")
    places = []
    for start, piece in zip([0, *accumulate(pieces)], pieces, strict=False):
        chunk = piece // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            places.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(places)


def check_shareable(settings: Any) -> None:
    """Raise TrainingError if Transformer Engine's `cp_comm_type` does not support the attention of a model with these
    megatron-core settings."""
    way = settings.cp_comm_type
    if settings.context_parallel_size == 1:
        return
    for is_used, needed, attention in (
        (settings.window_size is not None, "a2a", "sliding-window"),
        (settings.multi_latent_attention, "p2p", "latent"),
    ):
        if is_used and way != needed:
            raise TrainingError(
                f"policy.megatron_cfg.cp_comm_type: {way} does not support this model's {attention} attention; "
                f"choose policy.megatron_cfg.cp_comm_type={needed}"
            )


class _Gathered(torch.autograd.Function):
    """Values [M, ...] of this rank -> [c * M, ...] of all ranks. The gradient is this rank's part, unreduced."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextRanks) -> Tensor:
        ctx.context = context
        gathered = own.new_empty((context.size, *own.shape))
        dist.all_gather(list(gathered), own.contiguous(), context.group)
        return gathered.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0].chunk(ctx.context.size)[ctx.context.rank], None
