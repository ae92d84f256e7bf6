"""Context parallelism: the ranks of a group split each sequence, in Transformer Engine's order.

With c ranks, each packed sequence is split into 2 c chunks. Rank r has chunks r and 2 c - 1 - r, which balances causal
attention. Scores are gathered with their gradient, so losses see whole sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.errors import TrainingError
from nemo_rl_lite.policy.micro_batches import ModelInput, sent_together


@dataclass(frozen=True)
class ContextRanks:
    """This rank among the `size` ranks that share each sequence; `group` is None for one rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def splits(self) -> bool:
        """True if a rank has only a part of each sequence."""
        return self.size > 1

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
            return cls.whole(micro.to(device))
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
