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
from nemo_rl_lite.config.schema import PolicyConfig
from nemo_rl_lite.config.sizes import BatchMode, batch_mode, row_round
from nemo_rl_lite.losses.batch import sent


@dataclass(frozen=True)
class Layout:
    """How batches are cut. `size` is in sequences (fixed) or in tokens of the model's input (dynamic, packed); the
    input's length is rounded up to a multiple of `round_to` tokens."""

    mode: BatchMode
    size: int
    round_to: int
    together: int = 1
    """Neighbours that stay in one micro-batch. A fixed `size` counts such groups of neighbours."""
    piece: int = 1
    """Each packed sequence is padded to a multiple of this many tokens, in which context-parallel ranks share it."""

    @classmethod
    def configured(
        cls, config: PolicyConfig, purpose: Literal["train", "logprob"], on_gpu: bool, together: int = 1
    ) -> "Layout":
        """The configured layout for training or for logprobs."""
        mode, training, parallel = batch_mode(config, on_gpu), purpose == "train", config.megatron_cfg
        if mode == "fixed":
            size = config.train_micro_batch_size if training else config.logprob_batch_size
            return cls(mode, size, parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1, together)
        size, round_to, context = mb_tokens(config, mode, training), row_round(config), parallel.context_parallel_size
        return cls(mode, size, round_to, together, piece=2 * context if context > 1 else 1)

    def groups(self, lengths: Sequence[int], at_least: int = 1) -> list[list[int]]:
        """Indices of the sequences of each micro-batch. There are at least `at_least` micro-batches, if there are
        as many sequences, or groups of neighbours that stay together."""
        each = [lengths[start : start + self.together] for start in range(0, len(lengths), self.together)]
        if self.mode == "fixed":
            starts = range(0, len(each), self.size)
            groups = [list(range(start, min(start + self.size, len(each)))) for start in starts]
        elif self.mode == "packed":
            groups = _even_packs([sum(map(self.padded, one)) for one in each], self.size, at_least)
        else:
            # Each group of neighbours is padded to its longest.
            groups = _similar_lengths([len(one) * self.rounded(max(one)) for one in each], self.size, at_least)
        return [[item * self.together + place for item in group for place in range(self.together)] for group in groups]

    def rounded(self, length: int) -> int:
        return -(-length // self.round_to) * self.round_to

    def padded(self, length: int) -> int:
        """Tokens that a packed sequence takes."""
        return -(-length // self.piece) * self.piece


@dataclass(frozen=True)
class ModelInput:
    """A micro-batch as the model reads it: b sequences in n rows of S tokens."""

    rows: Tensor
    """Their indices in the batch they come from, [b]."""
    tokens_nS: Tensor
    lengths: Tensor
    """Tokens of each, [b]."""
    starts: Tensor
    """The index of each one's first token in `tokens_nS.flatten()`, [b]."""
    own_lengths: tuple[int, ...]
    """The same as `lengths`, on the host."""
    padded_lengths: tuple[int, ...]
    """Tokens of each with the padding that is its own: it attends to the sequence, and the sequence not to it."""
    packed: bool

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.own_lengths)

    def to(self, device: torch.device) -> "ModelInput":
        """Copy what `unpack` needs to `device`."""
        names = ("lengths", "starts")
        return replace(self, **{name: sent(getattr(self, name), device) for name in names})

    @property
    def pieces(self) -> list[int]:
        """Tokens of the packed sequences, and of the padding that follows as one more."""
        padding = self.tokens_nS.numel() - sum(self.padded_lengths)
        return [*self.padded_lengths, padding] if padding else list(self.padded_lengths)

    def boundaries(self) -> Tensor:
        """Cumulative lengths of the `pieces`, int32 [pieces + 1], on the host."""
        return torch.tensor([0, *accumulate(self.pieces)], dtype=torch.int32)

    def positions(self) -> Tensor:
        """Each token's place in its sequence, [n, S]."""
        count = torch.arange(self.tokens_nS.shape[1])
        if not self.packed:
            return count.expand_as(self.tokens_nS)
        return torch.cat([count[:length] for length in self.pieces])[None]

    def hidden_from(self) -> Tensor:
        """The attention mask: bool [1, 1, S, S], true (hidden) above the diagonal and between packed sequences."""
        length = self.tokens_nS.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.packed:
            sequence = torch.cat([torch.full((length,), place) for place, length in enumerate(self.pieces)])
            hidden |= sequence[:, None] != sequence[None, :]
        return hidden[None, None]

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
    starts = torch.arange(len(group)) * width
    return ModelInput(rows, padded, torch.tensor(own), starts, own, (width,) * len(group), packed=False)


def _pack(tokens_BT: Tensor, lengths: list[int], group: list[int], layout: Layout) -> ModelInput:
    own = tuple(lengths[row] for row in group)
    pieces, pad = tuple(map(layout.padded, own)), torch.nn.functional.pad
    each = [
        pad(tokens_BT[row, :length], (0, piece - length)) for row, length, piece in zip(group, own, pieces, strict=True)
    ]
    joined = torch.cat(each)
    row = pad(joined, (0, layout.rounded(len(joined)) - len(joined)))
    starts = torch.tensor([0, *accumulate(pieces[:-1])])
    return ModelInput(torch.tensor(group), row[None], torch.tensor(own), starts, own, pieces, packed=True)


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
