"""Context parallelism: the ranks of a group split each sequence, in Transformer Engine's order.

With c ranks, each packed sequence is cut into 2 c chunks, and rank r has chunks r and 2 c - 1 - r, so that all ranks
have as many pairs of tokens under the causal mask. The scores of a rank's positions are gathered with their gradient,
so that a loss sees whole sequences.
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
    """Place of this rank among the `size` ranks that share each sequence; `group` is None for one rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def splits(self) -> bool:
        """True if a rank has only a part of each sequence."""
        return self.size > 1

    def own(self, values_nS: Tensor, micro: ModelInput) -> Tensor:
        """Return this rank's part of values by position in a micro-batch, on the host: [n, S] -> [n, S / c]."""
        return values_nS[:, own_places(micro.pieces, self.rank, self.size)] if self.splits else values_nS


@dataclass(frozen=True)
class Shard:
    """Part of a micro-batch on one rank: n rows of S / c tokens, on the model's device."""

    tokens_nS: Tensor
    next_tokens_nS: Tensor
    """Token that follows each in its sequence, which another rank may have."""
    micro: ModelInput
    """Whole micro-batch."""
    context: ContextRanks = field(default_factory=ContextRanks)
    order: Tensor | None = None
    """Index of each position of the whole row among the gathered positions of all ranks, [N]; None for one rank."""

    @classmethod
    def of(cls, micro: ModelInput, context: ContextRanks, device: torch.device) -> "Shard":
        """Return this rank's part of a micro-batch on the host, which is packed if several ranks share it."""
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
        """Return all of a micro-batch."""
        return cls(micro.tokens_nS, micro.tokens_nS.roll(-1, dims=1), micro)

    def unpack(self, of_next_M: Tensor) -> Tensor:
        """Turn values [M, ...] about the next token, at each of this rank's positions, into [b, width, ...] of the
        whole micro-batch, on every rank; see `ModelInput.unpack`. Collective.

        Keeps gradients: each rank's values get the gradient of one rank's loss. All ranks compute the same loss, and
        megatron-core adds up what their parts contribute.
        """
        if self.order is None:
            return self.micro.unpack(of_next_M)
        return self.micro.unpack(_Gathered.apply(of_next_M, self.context)[self.order])

    def pack(self, of_token_bTk: Tensor) -> Tensor:
        """Turn values [b, width, k] about each token into [M, k] at this rank's positions; see `ModelInput.pack`."""
        packed_Nk = self.micro.pack(of_token_bTk)
        if self.order is None:
            return packed_Nk
        return packed_Nk[self.order.argsort().chunk(self.context.size)[self.context.rank]]


def own_places(pieces: Sequence[int], rank: int, size: int) -> Tensor:
    """Return the places in a row of the tokens of `rank`, in its order. `pieces`: tokens of the row's sequences.

    Raises:
        ValueError: a piece is not a multiple of 2 `size`.
    """
    if any(piece % (2 * size) for piece in pieces):
        raise ValueError(f"{size} context-parallel ranks cannot share sequences of {list(pieces)} tokens")
    places = []
    for start, piece in zip([0, *accumulate(pieces)], pieces, strict=False):
        chunk = piece // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            places.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(places)


def check_shareable(settings: Any) -> None:
    """Check that Transformer Engine can share the sequences of a model with these settings of megatron-core.

    Raises:
        TrainingError: `cp_comm_type` does not support the windows or the latent keys of its attention.
    """
    way = settings.cp_comm_type
    if settings.context_parallel_size == 1:
        return
    if settings.window_size is not None and way != "a2a":
        raise TrainingError(
            f"policy.megatron_cfg.cp_comm_type: {way} has no sliding windows, which this model's attention has; "
            "choose policy.megatron_cfg.cp_comm_type=a2a"
        )
    if settings.multi_latent_attention and way != "p2p":
        raise TrainingError(
            f"policy.megatron_cfg.cp_comm_type: {way} has no latent attention, which this model has; "
            "choose policy.megatron_cfg.cp_comm_type=p2p"
        )


class _Gathered(torch.autograd.Function):
    """Values [M, ...] of this rank -> [c * M, ...] of all ranks, joined. The gradient is this rank's part of the
    result's, unreduced."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextRanks) -> Tensor:
        ctx.context = context
        gathered = own.new_empty((context.size, *own.shape))
        dist.all_gather(list(gathered), own.contiguous(), context.group)
        return gathered.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0].chunk(ctx.context.size)[ctx.context.rank], None
