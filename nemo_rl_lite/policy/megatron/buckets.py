"""The few shapes that packs are padded to where a captured graph runs them, because a graph has one shape."""

from collections.abc import Sequence
from dataclasses import dataclass

# A row of tokens is padded by less than this share of itself, or to the layout's multiple.
PARTS = 16
# Transformer Engine's attention works on tiles of about this many tokens.
LEAST_WIDTH = 64
# Rows are a multiple of this, and of a quarter of the power of 2 below. It is even, for pairs.
LEAST_ROWS = 8


@dataclass(frozen=True)
class Bucket:
    """The shape of a padded pack. Sequences that are not there have length 0, and padding is cut into pieces that are
    no longer than the longest sequence may be."""

    tokens: int
    """Tokens of the row."""
    rows: int
    """Sequences."""
    width: int
    """Most tokens of a sequence."""
    pieces: int
    """Sequences and pieces of padding together."""

    @classmethod
    def of(cls, lengths: Sequence[int], round_to: int, most: int) -> "Bucket":
        """The bucket of sequences of these lengths. The row is a multiple of `round_to` tokens, and at most `most`
        tokens where they fit."""
        own = _rounded(sum(lengths), round_to)
        tokens = _rounded(own, _rounded(max(_power_of_2_below(own) // PARTS, 1), round_to))
        tokens = min(tokens, max(own, _rounded(most, round_to)))
        rows = _rounded(len(lengths), max(_power_of_2_below(len(lengths)) // 4, LEAST_ROWS))
        width = _power_of_2(max(*lengths, LEAST_WIDTH))
        # Padding is shorter than a step between two buckets and what `round_to` adds.
        padding = max(tokens // PARTS, 1) + 2 * round_to
        return cls(tokens, rows, width, rows + -(-padding // width))

    def pieces_of(self, lengths: Sequence[int]) -> list[int]:
        """Tokens of each piece: of the sequences, given with those that are not there, and of the padding."""
        padding = self.tokens - sum(lengths)
        whole, rest = divmod(padding, self.width)
        used = [*lengths, *[self.width] * whole, rest]
        return used + [0] * (self.pieces - len(used))


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _power_of_2_below(most: int) -> int:
    return 1 << (most.bit_length() - 1)
