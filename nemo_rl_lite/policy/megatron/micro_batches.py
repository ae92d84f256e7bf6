"""Cuts batches into micro-batches, and lays their sequences into the model's input.

Three layouts: a fixed number of right-padded sequences; as many padded sequences of similar length as fit a number of
tokens (dynamic batching); sequences joined in a single row, each attending to itself alone (sequence packing).
Logprobs and gradients do not depend on the layout, beyond floating-point rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from nemo_rl_lite.config.automatic import mb_tokens
from nemo_rl_lite.config.sections.policy import PolicyConfig
from nemo_rl_lite.config.sizes import BatchMode, batch_mode, row_round
from nemo_rl_lite.policy.megatron.buckets import Bucket
from nemo_rl_lite.policy.megatron.sending import sent_together


@dataclass(frozen=True)
class Layout:
    """How batches are cut. `size` is in sequences (fixed) or in tokens of the model's input (dynamic, packed); the
    input's length is rounded up to a multiple of `round_to` tokens."""

    mode: BatchMode
    size: int
    round_to: int
    together: int = 1
    """Neighbours that stay in one micro-batch. A fixed `size` counts such groups of neighbours."""
    in_buckets: bool = False
    """Whether packs are padded to few shapes: see `Bucket`."""
    piece: int = 1
    """Each packed sequence is padded to a multiple of this many tokens, so that context-parallel ranks can share it."""

    @classmethod
    def configured(
        cls, config: PolicyConfig, purpose: Literal["train", "logprob"], on_gpu: bool, together: int = 1
    ) -> "Layout":
        """The configured layout for training or for logprobs."""
        mode, training, parallel = batch_mode(config, on_gpu), purpose == "train", config.megatron_cfg
        if mode == "fixed":
            size = config.train_micro_batch_size if training else config.logprob_batch_size
            return cls(mode, size, parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1, together)
        in_buckets, context = training and on_gpu and parallel.cuda_graph_impl != "none", parallel.context_parallel_size
        piece = 2 * context if context > 1 else 1
        return cls(mode, mb_tokens(config, mode, training), row_round(config), together, in_buckets, piece)

    def groups(self, lengths: Sequence[int], at_least: int = 1) -> list[list[int]]:
        """Indices of the sequences of each micro-batch. There are at least `at_least` micro-batches, if there are
        as many sequences, or groups of neighbours that stay together."""
        each = [lengths[start : start + self.together] for start in range(0, len(lengths), self.together)]
        if self.mode == "fixed":
            starts = range(0, len(each), self.size)
            groups = [list(range(start, min(start + self.size, len(each)))) for start in starts]
        elif self.mode == "packed":
            groups = _even_packs([sum(_up(length, self.piece) for length in one) for one in each], self.size, at_least)
        else:
            # Each group of neighbours is padded to its longest.
            groups = _similar_lengths([len(one) * self.rounded(max(one)) for one in each], self.size, at_least)
        return [[item * self.together + place for item in group for place in range(self.together)] for group in groups]

    def rounded(self, length: int) -> int:
        return _up(length, self.round_to)


@dataclass(frozen=True)
class ModelInput:
    """A micro-batch as the model reads it: b sequences in n rows of S tokens. In a bucket, the last of the sequences
    may have length 0: these are in no batch."""

    rows: Tensor
    """The indices in the batch of those that come from it."""
    tokens_nS: Tensor
    lengths: Tensor
    """Tokens of each, [b]."""
    starts: Tensor
    """The index of each one's first token in `tokens_nS.flatten()`, [b]."""
    own_lengths: tuple[int, ...]
    """The same as `lengths`, on the host."""
    packed: bool
    bucket: Bucket | None = None
    piece: int = 1
    """Behind each packed sequence is padding, up to a multiple of this many tokens. It attends to the sequence, and the
    sequence not to it."""

    @property
    def width(self) -> int:
        """Tokens of the longest sequence, or of the longest that the bucket has room for."""
        return max(self.own_lengths) if self.bucket is None else self.bucket.width

    def to(self, device: torch.device) -> "ModelInput":
        """Copy all tensors but `rows` to `device`."""
        names = ("tokens_nS", "lengths", "starts")
        return replace(self, **sent_together({name: getattr(self, name) for name in names}, device))

    @property
    def pieces(self) -> list[int]:
        """Tokens of the packed sequences, and of the padding that follows as one more, or several in a bucket."""
        if self.bucket is not None:
            return self.bucket.pieces_of(self.own_lengths)
        padded = [_up(length, self.piece) for length in self.own_lengths]
        padding = self.tokens_nS.numel() - sum(padded)
        return [*padded, padding] if padding else padded

    @property
    def longest(self) -> int:
        """Tokens of the longest of the `pieces`, or of the longest that the bucket has room for."""
        return max(self.pieces) if self.bucket is None else self.bucket.width

    def boundaries(self) -> Tensor:
        """Cumulative lengths of the `pieces`, int32 [pieces + 1], on the host."""
        return torch.tensor([0, *accumulate(self.pieces)], dtype=torch.int32)

    def positions(self) -> Tensor:
        """Each token's place in its sequence, [n, S]."""
        count = torch.arange(self.tokens_nS.shape[1])
        if not self.packed:
            return count.expand_as(self.tokens_nS)
        pieces = torch.tensor(self.pieces)
        return (count - (pieces.cumsum(0) - pieces).repeat_interleave(pieces))[None]

    def hidden_from(self) -> Tensor:
        """The attention mask: bool [1, 1, S, S], true (hidden) above the diagonal and between packed sequences."""
        length = self.tokens_nS.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.packed:
            sequence = torch.cat([torch.full((length,), place) for place, length in enumerate(self.pieces)])
            hidden |= sequence[:, None] != sequence[None, :]
        return hidden[None, None]

    def lay(self, of_token_bT: Tensor, outside: int) -> Tensor:
        """Values [b, width, ...] of each token -> [n, S, ...], where the input has it; `outside` elsewhere."""
        place = torch.arange(self.width)
        index = (self.starts[:, None] + place)[inside := place < self.lengths[:, None]]
        laid = of_token_bT.new_full((self.tokens_nS.numel(), *of_token_bT.shape[2:]), outside)
        laid[index] = of_token_bT[:, : self.width][inside]
        return laid.view(*self.tokens_nS.shape, *of_token_bT.shape[2:])

    def pack(self, of_token_bTk: Tensor) -> Tensor:
        """The opposite of `unpack`: values [b, width, k] about each token -> [N, k], where the input has the token
        before it; 0 elsewhere."""
        place = torch.arange(self.width, device=of_token_bTk.device)
        inside = (place > 0) & (place < self.lengths[:, None])
        packed = of_token_bTk.new_zeros(self.tokens_nS.numel(), of_token_bTk.shape[2])
        # The places outside share one that `unpack` does not read: that of the last token of the first sequence.
        index = torch.where(inside, self.starts[:, None] + place - 1, self.starts[0] + self.lengths[0] - 1)
        packed[index.flatten()] = torch.where(inside[..., None], of_token_bTk, 0).flatten(0, 1)
        return packed

    def unpack(self, of_next_N: Tensor) -> Tensor:
        """Values [N, ...] about the following token at each of the input's N = n * S positions -> [b, width, ...],
        entry t for token t.

        Entry 0, which nothing precedes, and entries beyond a sequence's end are 0. Keeps gradients.
        """
        place = torch.arange(self.width, device=of_next_N.device)
        index = (self.starts[:, None] + place - 1).clamp(0, len(of_next_N) - 1)
        inside = (place > 0) & (place < self.lengths[:, None])
        return torch.where(inside.view(*inside.shape, *[1] * (of_next_N.dim() - 1)), of_next_N[index], 0)


def cut(tokens_BT: Tensor, lengths_B: Tensor, layout: Layout, at_least: int = 1) -> list[ModelInput]:
    """The micro-batches of right-padded sequences, in the layout's order."""
    lengths = lengths_B.tolist()
    lay = _pack if layout.mode == "packed" else _pad
    return [lay(tokens_BT, lengths, group, layout) for group in layout.groups(lengths, at_least)]


def _pad(tokens_BT: Tensor, lengths: list[int], group: list[int], layout: Layout) -> ModelInput:
    rows = torch.tensor(group)
    # A fixed layout keeps the width of the replica's whole batch, so that all micro-batches, and both the passes for
    # logprobs and for training, have one shape.
    longest = tokens_BT.shape[1] if layout.mode == "fixed" else max(lengths[row] for row in group)
    width = layout.rounded(longest)
    padded = torch.nn.functional.pad(tokens_BT[rows, :width], (0, max(width - tokens_BT.shape[1], 0)))
    own = tuple(lengths[row] for row in group)
    return ModelInput(rows, padded, torch.tensor(own), torch.arange(len(group)) * width, own, packed=False)


def _pack(tokens_BT: Tensor, lengths: list[int], group: list[int], layout: Layout) -> ModelInput:
    rows, own = torch.tensor(group), tuple(lengths[row] for row in group)
    wide = [_up(length, layout.piece) for length in own]
    each, pieces = torch.tensor(own), torch.tensor(wide)
    starts = pieces.cumsum(0) - pieces
    place = torch.arange(sum(own)) - (each.cumsum(0) - each).repeat_interleave(each)
    bucket = Bucket.of(own, layout.round_to, layout.size) if layout.in_buckets else None
    tokens = layout.rounded(sum(wide)) if bucket is None else bucket.tokens
    row = tokens_BT.new_zeros(tokens)
    row[starts.repeat_interleave(each) + place] = tokens_BT[rows.repeat_interleave(each), place]
    missing = 0 if bucket is None else bucket.rows - len(own)
    starts, each = (torch.nn.functional.pad(values, (0, missing)) for values in (starts, each))
    own += (0,) * missing
    return ModelInput(rows, row[None], each, starts, own, packed=True, bucket=bucket, piece=layout.piece)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _similar_lengths(lengths: Sequence[int], limit: int, at_least: int) -> list[list[int]]:
    """Sorted by length and cut where rows x longest would exceed `limit` tokens; then halved to `at_least` groups."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= limit:
            groups[-1].append(index)
        else:
            groups.append([index])
    return _split_to(groups, at_least)


def _even_packs(lengths: Sequence[int], limit: int, at_least: int) -> list[list[int]]:
    """Packs of at most `limit` tokens and nearly equal sums: longest first, each to the emptiest pack."""
    count = max(at_least, -(-sum(lengths) // limit))
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    while True:
        packs: list[list[int]] = [[] for _ in range(count)]
        sums = [0] * count
        for index in order:
            emptiest = sums.index(min(sums))
            packs[emptiest].append(index)
            sums[emptiest] += lengths[index]
        if max(sums) <= limit or count >= len(lengths):
            return [sorted(pack) for pack in packs if pack]
        count += 1


def _split_to(groups: list[list[int]], count: int) -> list[list[int]]:
    """Halve the largest groups until there are `count`."""
    groups = list(groups)
    while len(groups) < count and max(map(len, groups)) > 1:
        largest = max(range(len(groups)), key=lambda index: len(groups[index]))
        middle = len(groups[largest]) // 2
        groups[largest : largest + 1] = [groups[largest][:middle], groups[largest][middle:]]
    return groups
