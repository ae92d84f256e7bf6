"""Split batches into micro-batches, distribute sequences over replicas, and copy tensors to the device.

Layouts:

- fixed: a fixed number of right-padded sequences
- dynamic: padded sequences of similar length, up to a token budget
- packed: sequences concatenated in one row, with attention within each. They may share prefixes: `shared_prompts.py`

Up to rounding, logprobs and gradients do not depend on the layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, batched
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.config.schema import PolicyConfig
from nemo_rl_lite.config.sizes import BatchMode, batch_mode, least_saved, mb_tokens, row_round
from nemo_rl_lite.policy.balance import even_work, swapped
from nemo_rl_lite.policy.shared_prompts import Family, families_of, parts_of

Cost = Callable[[int], float]
"""Work of a sequence with this number of tokens, in any unit."""

# A bucket's row is padded by less than 1 / PARTS, or to the layout's multiple.
PARTS = 16
# Smallest width of a bucket: about a tile of Transformer Engine's attention.
LEAST_WIDTH = 64
# A bucket's rows are a multiple of this (even, for pairs), and of a quarter of the next lower power of 2.
LEAST_ROWS = 8
# Alignment of `packed` tensors, for any dtype and for fast reads.
_ALIGNED = 256


def round_up(count: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `count`."""
    return -(-count // step) * step


def _power_of_2_below(most: int) -> int:
    return 1 << (most.bit_length() - 1)


@dataclass(frozen=True)
class Bucket:
    """Padded size of a pack, for a CUDA graph. Missing sequences have length 0. Padding is split into pieces of at
    most `width` tokens."""

    tokens: int
    """Tokens of the row."""
    rows: int
    """Number of sequences."""
    width: int
    """Maximum length of a sequence."""
    pieces: int
    """Number of sequences and pieces of padding."""

    @classmethod
    def of(cls, lengths: Sequence[int], round_to: int, most: int) -> "Bucket":
        """Choose the bucket for these lengths. The row is a multiple of `round_to` tokens, with at most `most` tokens
        if they fit."""
        own = round_up(sum(lengths), round_to)
        tokens = round_up(own, round_up(max(_power_of_2_below(own) // PARTS, 1), round_to))
        tokens = min(tokens, max(own, round_up(most, round_to)))
        rows = round_up(len(lengths), max(_power_of_2_below(len(lengths)) // 4, LEAST_ROWS))
        width = 1 << (max(*lengths, LEAST_WIDTH) - 1).bit_length()
        # Upper bound: a step between two buckets, and rounding.
        padding = max(tokens // PARTS, 1) + 2 * round_to
        return cls(tokens, rows, width, rows + -(-padding // width))

    def pieces_of(self, lengths: Sequence[int]) -> list[int]:
        """Return the tokens of all pieces: sequences, missing ones included, and padding."""
        whole, rest = divmod(self.tokens - sum(lengths), self.width)
        used = [*lengths, *[self.width] * whole, rest]
        return used + [0] * (self.pieces - len(used))


@dataclass(frozen=True)
class Layout:
    """Rule for splitting batches into micro-batches."""

    mode: BatchMode
    size: int
    """In sequences (fixed), or in tokens of the model's input (dynamic, packed)."""
    round_to: int
    """The input's length is a multiple of this."""
    together: int = 1
    """Number of neighbours that stay in one micro-batch. A fixed `size` counts groups of neighbours."""
    in_buckets: bool = False
    """Pad packs to a `Bucket`."""
    piece: int = 1
    """Packed sequences are padded to a multiple of this many tokens, for context-parallel ranks."""
    least_saved: float | None = None
    """Packed sequences share prefixes if they save more than this share of a batch's tokens; None if they never do."""
    whole: "Layout | None" = None
    """Layout of packs that one context-parallel rank has whole; None if the ranks share all packs."""

    @classmethod
    def configured(
        cls,
        config: PolicyConfig,
        purpose: Literal["train", "logprob"],
        on_gpu: bool,
        together: int = 1,
        can_share: bool = False,
    ) -> "Layout":
        """Return the configured layout for training or for logprobs. `can_share`: the model can share prefixes."""
        mode, training, parallel = batch_mode(config, on_gpu), purpose == "train", config.megatron_cfg
        if mode == "fixed":
            size = config.train_micro_batch_size if training else config.logprob_batch_size
            return cls(mode, size, parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1, together)
        in_buckets, context = training and on_gpu and parallel.cuda_graph_impl != "none", parallel.context_parallel_size
        piece = 2 * context if context > 1 else 1
        least, size = least_saved(config) if can_share else None, mb_tokens(config, mode, training)
        layout = cls(mode, size, row_round(config, context), together, in_buckets, piece, least)
        if context == 1 or not parallel.hybrid_context_parallel:
            return layout
        # A rank has as many tokens as of a shared pack.
        return replace(layout, whole=replace(layout, size=size // context, round_to=row_round(config, 1), piece=1))

    def groups(self, lengths: Sequence[int], at_least: int = 1) -> list[list[int]]:
        """Return the indices of each micro-batch's sequences: `at_least` micro-batches, if there are that many
        sequences or groups of neighbours."""
        each = [lengths[start : start + self.together] for start in range(0, len(lengths), self.together)]
        if self.mode == "fixed":
            starts = range(0, len(each), self.size)
            groups = [list(range(start, min(start + self.size, len(each)))) for start in starts]
        elif self.mode == "packed":
            groups = _even_packs(
                [sum(round_up(length, self.piece) for length in one) for one in each], self.size, at_least
            )
        else:
            # Each group of neighbours is padded to its longest.
            groups = _similar_lengths([len(one) * self.rounded(max(one)) for one in each], self.size, at_least)
        return [[item * self.together + place for item in group for place in range(self.together)] for group in groups]

    def packs(self, tokens_BT: Tensor, lengths: Sequence[int], at_least: int = 1) -> list[list[Family]]:
        """Return the families of each pack: `groups` of packed rows if they share no prefixes."""
        if self.least_saved is None:
            return [[Family(range(row, row + 1)) for row in group] for group in self.groups(lengths, at_least)]
        families = families_of(tokens_BT, lengths, self.together, self.least_saved)
        parts = parts_of(families, lengths, self.size, self.together, at_least)
        packs = _even_packs([part.tokens(lengths) for part in parts], self.size, at_least)
        return [[parts[place] for place in pack] for pack in packs]

    def rounded(self, length: int) -> int:
        return round_up(length, self.round_to)


@dataclass(frozen=True)
class Prefixes:
    """Prefixes that the b sequences of a pack share. Each is a piece of the row, before the rests of its sequences."""

    lengths: Tensor
    """Tokens of each sequence's prefix, [b]; 0 without one."""
    starts: Tensor
    """Index of its first token in the row, [b]."""
    pieces: tuple[int, ...]
    """Tokens of each piece: prefixes, and rests of sequences."""
    seen: tuple[range, ...]
    """Tokens before each piece that it attends to."""


@dataclass(frozen=True)
class ModelInput:
    """Micro-batch for the model: b sequences in n rows of S tokens. In a bucket, the last sequences may be missing,
    with length 0."""

    rows: Tensor
    """Indices of the sequences in the batch."""
    tokens_nS: Tensor
    lengths: Tensor
    """Tokens of each sequence, [b]."""
    starts: Tensor
    """Index of each sequence's first token in `tokens_nS.flatten()`, [b]. With a shared prefix, that of its rest minus
    the prefix's length."""
    own_lengths: tuple[int, ...]
    """`lengths` on the host."""
    packed: bool
    bucket: Bucket | None = None
    piece: int = 1
    """See `Layout`. A sequence's padding attends to the sequence, but not the reverse. 1 if one rank has the whole
    pack."""
    prefixes: Prefixes | None = None
    """None if no sequences share any."""
    is_filler: bool = False
    """Repeats another micro-batch, without loss, to complete the number of micro-batches (`passes.cut_batch`)."""

    @property
    def width(self) -> int:
        """Maximum length of a sequence, of the bucket if there is one."""
        return max(self.own_lengths) if self.bucket is None else self.bucket.width

    def to(self, device: torch.device) -> "ModelInput":
        """Copy all tensors except `rows` to `device`."""
        own = {name: getattr(self, name) for name in ("tokens_nS", "lengths", "starts")}
        if self.prefixes is None:
            return replace(self, **sent_together(own, device))
        own |= {"of_prefixes": self.prefixes.lengths, "to_prefixes": self.prefixes.starts}
        sent = sent_together(own, device)
        prefixes = replace(self.prefixes, lengths=sent.pop("of_prefixes"), starts=sent.pop("to_prefixes"))
        return replace(self, prefixes=prefixes, **sent)

    @property
    def pieces(self) -> list[int]:
        """Tokens of the packed sequences and of the padding after them (one piece, or several in a bucket)."""
        if self.bucket is not None:
            return self.bucket.pieces_of(self.own_lengths)
        if self.prefixes is not None:
            padded = [*self.prefixes.pieces]
        else:
            padded = [round_up(length, self.piece) for length in self.own_lengths]
        padding = self.tokens_nS.numel() - sum(padded)
        return [*padded, padding] if padding else padded

    @property
    def longest(self) -> tuple[int, int]:
        """Maximum number of tokens and of keys of the `pieces`, of the bucket if there is one."""
        return (max(self.pieces), max(self.key_pieces)) if self.bucket is None else (self.bucket.width,) * 2

    def boundaries(self) -> Tensor:
        """Return cumulative lengths of the `pieces`, int32 [pieces + 1], on the host."""
        return torch.tensor([0, *accumulate(self.pieces)], dtype=torch.int32)

    def key_boundaries(self) -> Tensor:
        """Return cumulative numbers of keys of the `pieces`, int32 [pieces + 1], on the host."""
        return torch.tensor([0, *accumulate(self.key_pieces)], dtype=torch.int32)

    def positions(self) -> Tensor:
        """Return each token's place in its sequence, [n, S]."""
        count = torch.arange(self.tokens_nS.shape[1])
        if not self.packed:
            return count.expand_as(self.tokens_nS)
        pieces, before = torch.tensor(self.pieces), torch.tensor([len(own) for own in self.seen])
        return (count - (pieces.cumsum(0) - pieces - before).repeat_interleave(pieces))[None]

    @property
    def seen(self) -> list[range]:
        """Tokens of shared prefixes that each of the `pieces` attends to."""
        seen = [] if self.prefixes is None else [*self.prefixes.seen]
        return seen + [range(0)] * (len(self.pieces) - len(seen))

    @property
    def key_pieces(self) -> list[int]:
        """Number of keys of each piece: tokens of its shared prefix, and its own."""
        return [len(seen) + piece for seen, piece in zip(self.seen, self.pieces, strict=True)]

    def keys(self) -> Tensor:
        """Return the index of each key's token in the row, by piece, [K]."""
        ends = accumulate(self.pieces)
        places = [
            (seen, range(end - piece, end)) for seen, piece, end in zip(self.seen, self.pieces, ends, strict=True)
        ]
        return torch.cat([torch.arange(own.start, own.stop) for pair in places for own in pair])

    def hidden_from(self) -> Tensor:
        """Return the attention mask, bool [1, 1, S, K]: hidden above the diagonal and between pieces. Without shared
        prefixes, the K keys are the row's."""
        length = self.tokens_nS.shape[1]
        if not self.packed:
            return torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        own, of_keys = (
            torch.arange(len(self.pieces)).repeat_interleave(torch.tensor(each))
            for each in (self.pieces, self.key_pieces)
        )
        place = self.positions()[0]
        return ((own[:, None] != of_keys) | (place[:, None] < place[self.keys()]))[None, None]

    def places_before(self, place: Tensor) -> Tensor:
        """Return the index of the token before each `place` of each sequence in `tokens_nS.flatten()`, [b, places]."""
        index = self.starts[:, None] + place - 1
        if self.prefixes is None:
            return index
        return torch.where(place <= self.prefixes.lengths[:, None], self.prefixes.starts[:, None] + place - 1, index)

    def saved(self, cost: Cost) -> float:
        """Return the work of a forward pass that shared prefixes save: each counts for all its sequences but one."""
        if self.prefixes is None or self.is_filler:
            return 0.0
        seen = list(filter(None, self.prefixes.seen))
        return sum(cost(len(own)) for own in seen) - sum(cost(len(own)) for own in {*seen})

    def lay(self, values: Tensor, counts: Tensor, outside: int) -> Tensor:
        """Place values of the first tokens of each sequence in the input's layout, [n, S, ...], with `outside`
        elsewhere. `counts`: tokens of each sequence that have values, whose sum is `len(values)`. A shared token has
        the value of the first sequence that has one."""
        place = torch.arange(int(counts.max())) if len(counts) else torch.arange(0)
        inside = place < counts[:, None]
        laid = values.new_full((self.tokens_nS.numel(), *values.shape[1:]), outside)
        index = self.places_before(place + 1)[: len(counts)][inside]
        if self.prefixes is not None:
            index, first = map(torch.from_numpy, np.unique(index.numpy(), return_index=True))
            values = values[first]
        laid[index] = values
        return laid.view(*self.tokens_nS.shape, *values.shape[1:])

    def pack(self, of_token_bTk: Tensor) -> Tensor:
        """Invert `unpack`: values [b, width, k] of each token -> [N, k], at the previous token."""
        place = torch.arange(self.width, device=of_token_bTk.device)
        inside = (place > 0) & (place < self.lengths[:, None])
        packed = of_token_bTk.new_zeros(self.tokens_nS.numel(), of_token_bTk.shape[2])
        # Other places map to one that `unpack` does not read: the last token of the first sequence.
        index = torch.where(inside, self.places_before(place), self.starts[0] + self.lengths[0] - 1)
        packed[index.flatten()] = torch.where(inside[..., None], of_token_bTk, 0).flatten(0, 1)
        return packed

    def unpack(self, of_next_N: Tensor) -> Tensor:
        """Return values [b, width, ...] by token from values [N, ...] of the next token at the input's N = n * S
        positions. Entry 0 and entries beyond a sequence's end are 0. Keeps gradients."""
        place = torch.arange(self.width, device=of_next_N.device)
        index = self.places_before(place).clamp(0, len(of_next_N) - 1)
        inside = (place > 0) & (place < self.lengths[:, None])
        return torch.where(inside.view(*inside.shape, *[1] * (of_next_N.dim() - 1)), of_next_N[index], 0)


def cut(tokens_BT: Tensor, lengths_B: Tensor, layout: Layout, at_least: int = 1) -> list[ModelInput]:
    """Split right-padded sequences into micro-batches, in the layout's order."""
    lengths = lengths_B.tolist()
    if layout.mode == "packed":
        return [_pack(tokens_BT, lengths, pack, layout) for pack in layout.packs(tokens_BT, lengths, at_least)]
    return [_pad(tokens_BT, lengths, group, layout) for group in layout.groups(lengths, at_least)]


def _pad(tokens_BT: Tensor, lengths: list[int], group: list[int], layout: Layout) -> ModelInput:
    rows = torch.tensor(group)
    # A fixed layout pads to the replica's batch, so that all passes for logprobs and training have one shape.
    longest = tokens_BT.shape[1] if layout.mode == "fixed" else max(lengths[row] for row in group)
    width = layout.rounded(longest)
    padded = torch.nn.functional.pad(tokens_BT[rows, :width], (0, max(width - tokens_BT.shape[1], 0)))
    own = tuple(lengths[row] for row in group)
    return ModelInput(rows, padded, torch.tensor(own), torch.arange(len(group)) * width, own, packed=False)


def _pack(tokens_BT: Tensor, lengths: list[int], pack: Sequence[Family], layout: Layout) -> ModelInput:
    rows = [row for family in pack for row in family.rows]
    # Row, first token and number of tokens of each piece: prefixes, and rests of rows.
    pieces = [
        piece
        for family in pack
        for piece in (
            *([(family.rows.start, 0, family.prefix)] if family.prefix else []),
            *((row, family.prefix, lengths[row] - family.prefix) for row in family.rows),
        )
    ]
    counts = [count for _, _, count in pieces]
    # The first place of each piece in the pack, and its end.
    places = [0, *accumulate(round_up(count, layout.piece) for count in counts)]
    of_rows, firsts, each = (torch.tensor(values) for values in zip(*pieces, strict=True))
    starts = torch.tensor(places[:-1])
    inside = torch.arange(sum(counts)) - (each.cumsum(0) - each).repeat_interleave(each)
    own = tuple(lengths[row] for row in rows)
    bucket = Bucket.of(own, layout.round_to, layout.size) if layout.in_buckets else None
    row = tokens_BT.new_zeros(layout.rounded(places[-1]) if bucket is None else bucket.tokens)
    row[starts.repeat_interleave(each) + inside] = tokens_BT[
        of_rows.repeat_interleave(each), firsts.repeat_interleave(each) + inside
    ]
    prefixes, rests = _prefixes(pack, counts, places)
    # Where each row would begin if its prefix preceded its rest.
    begins, missing = (
        [places[rest] - pieces[rest][1] for rest in rests],
        0 if bucket is None else bucket.rows - len(own),
    )
    own += (0,) * missing
    found = ModelInput(
        torch.tensor(rows),
        row[None],
        torch.tensor(own),
        torch.tensor([*begins, *[0] * missing]),
        own,
        packed=True,
        bucket=bucket,
        piece=layout.piece,
    )
    return replace(found, prefixes=prefixes)


def _prefixes(
    pack: Sequence[Family], pieces: Sequence[int], starts: Sequence[int]
) -> tuple[Prefixes | None, list[int]]:
    """Return the prefixes of a pack, and the indices of its `pieces` that are rests of rows. `starts`: of pieces."""
    lengths, begins, seen, rests = list[int](), list[int](), list[range](), list[int]()
    for family in pack:
        begin = starts[len(seen)]
        if family.prefix:
            seen.append(range(0))
        rests += range(len(seen), len(seen) + len(family.rows))
        seen += [range(begin, begin + family.prefix)] * len(family.rows)
        lengths += [family.prefix] * len(family.rows)
        begins += [begin] * len(family.rows)
    if not any(lengths):
        return None, rests
    return Prefixes(torch.tensor(lengths), torch.tensor(begins), tuple(pieces), tuple(seen)), rests


def balanced_shares(
    lengths: Sequence[int],
    replicas: int,
    cost: Cost,
    together: int = 1,
    layout: Layout | None = None,
    equally_many: bool = False,
    prompts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the indices of each replica's sequences, in ascending order, with similar work. `together` neighbours stay
    together, and divide the number of sequences.

    A replica's work is the sum of its sequences' costs, or with a `layout`, of its micro-batches with padding.
    `equally_many`: the numbers of sequences differ by at most one group of neighbours. `prompts`: tokens that the
    sequences of each of the first groups share, and that cost once.
    """
    groups = [sum(map(cost, own)) if layout is None else work(own, layout, cost) for own in batched(lengths, together)]
    for place, prompt in enumerate(prompts or ()):
        groups[place] -= (together - 1) * cost(prompt)
    shares = even_work(groups, replicas, -(-len(groups) // replicas) if equally_many else None)
    if layout is not None and layout.mode == "dynamic":
        shares = swapped(shares, groups, lambda share: work(_lengths(share, lengths, together), layout, cost))
    return [[group * together + place for group in share for place in range(together)] for share in shares]


def work(lengths: Sequence[int], layout: Layout, cost: Cost) -> float:
    """Return the cost of sequences in micro-batches, each padded to its longest sequence."""
    if layout.mode == "packed":
        return sum(map(cost, lengths))
    groups = layout.groups(lengths)
    return sum(len(group) * cost(layout.rounded(max(lengths[row] for row in group))) for group in groups)


def _lengths(share: Sequence[int], lengths: Sequence[int], together: int) -> list[int]:
    return [length for group in share for length in lengths[group * together : (group + 1) * together]]


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` to `device`, asynchronously to a GPU."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def sent_together(values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy as `sent` does, with one copy to a GPU. The results share memory and must not be changed in place, because
    autograd would consider all changed.

    A copy engine works in order, so during a reload of optimizer states each copy waits for a chunk of it
    (`offload/host_memory.py`). A micro-batch has a dozen small tensors.
    """
    if device.type != "cuda":
        return {name: one.to(device) for name, one in values.items()}
    return unpacked(packed(values, pin=True).to(device, non_blocking=True), values)


def packed(values: Mapping[str, Tensor], pin: bool) -> Tensor:
    """Return the bytes of host tensors, uint8 [n]."""
    whole = torch.empty(packed_bytes(values), dtype=torch.uint8, pin_memory=pin)
    for name, place in unpacked(whole, values).items():
        place.copy_(values[name])
    return whole


def unpacked(whole: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of `packed` bytes with the names, types and shapes of `like`."""
    views, start = {}, 0
    for name, one in like.items():
        views[name] = whole[start : start + one.nbytes].view(one.dtype).view(one.shape)
        start += round_up(one.nbytes, _ALIGNED)
    return views


def packed_bytes(values: Mapping[str, Tensor]) -> int:
    return sum(round_up(one.nbytes, _ALIGNED) for one in values.values())


def _similar_lengths(lengths: Sequence[int], limit: int, at_least: int) -> list[list[int]]:
    """Group sequences, longest first, up to `limit` tokens with padding; split the largest groups until there are
    `at_least`."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= limit:
            groups[-1].append(index)
        else:
            groups.append([index])
    while len(groups) < at_least and max(map(len, groups)) > 1:
        largest = max(range(len(groups)), key=lambda index: len(groups[index]))
        middle = len(groups[largest]) // 2
        groups[largest : largest + 1] = [groups[largest][:middle], groups[largest][middle:]]
    return groups


def _even_packs(lengths: Sequence[int], limit: int, at_least: int) -> list[list[int]]:
    """Return packs of at most `limit` tokens with similar sums: longest sequence first, each into the emptiest pack."""
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
