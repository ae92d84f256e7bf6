"""Triton kernels of copy_table.py. Import them only where Triton is installed."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Words per tile. Larger tiles need more registers, so the GPU runs fewer tiles at once."""


@triton.jit
def _wrap(first, steps, size, BLOCK: tl.constexpr):
    """Return how often `first + steps` passes `size`, and its remainder. `steps` are below BLOCK, and `first` is below
    `size`. Divides 32-bit numbers, because GPUs divide 64-bit numbers slowly."""
    left = tl.minimum(size - first, BLOCK).to(tl.int32)
    width = tl.minimum(size, BLOCK).to(tl.int32)
    after = tl.maximum(steps - left, 0)
    wraps = tl.where(steps < left, 0, 1 + after // width)
    return wraps, tl.where(steps < left, first + steps, (after % width).to(tl.int64))


@triton.jit
def _tile(rows, tiles, out, WORD: tl.constexpr, ALIGNED: tl.constexpr, COMPARE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy or compare one tile: BLOCK words of a row of the table."""
    tile = tl.program_id(0)
    row = rows + tl.load(tiles + tile).to(tl.int64) * 11
    source = tl.load(row).to(tl.pointer_type(WORD))  # pyrefly: ignore[bad-argument-type]
    target = tl.load(row + 1).to(tl.pointer_type(WORD))  # pyrefly: ignore[bad-argument-type]
    total, run, count = tl.load(row + 2), tl.load(row + 4), tl.load(row + 5)
    outer_from, outer_to = tl.load(row + 6), tl.load(row + 7)
    row_from, row_to = tl.load(row + 8), tl.load(row + 9)
    start = (tile - tl.load(row + 3)) * BLOCK
    line, column = start // run, start % run
    outer, inner = line // count, line % count
    steps = tl.arange(0, BLOCK)
    if column + BLOCK <= run:
        # Without a mask, loads and stores have 16 bytes.
        reading = source + outer * outer_from + inner * row_from + column + steps
        writing = target + outer * outer_to + inner * row_to + column + steps
        reading = tl.max_contiguous(tl.multiple_of(reading, ALIGNED), BLOCK)
        writing = tl.max_contiguous(tl.multiple_of(writing, ALIGNED), BLOCK)
        words = tl.load(reading)
        if COMPARE:
            different = tl.max((words != tl.load(writing)).to(tl.int32), axis=0)
            if different:
                tl.atomic_min(out, tl.load(row + 10))
        else:
            tl.store(writing, words)
    else:
        lines, columns = _wrap(column, steps, run, BLOCK)
        outers, inners = _wrap(inner, lines, count, BLOCK)
        mask = start + steps < total
        reading = source + (outer + outers) * outer_from + inners * row_from + columns
        writing = target + (outer + outers) * outer_to + inners * row_to + columns
        words = tl.load(reading, mask=mask, other=0)
        if COMPARE:
            different = tl.max((words != tl.load(writing, mask=mask, other=0)).to(tl.int32), axis=0)
            if different:
                tl.atomic_min(out, tl.load(row + 10))
        else:
            tl.store(writing, words, mask=mask)


def copy(word: int, rows: Tensor, tiles: Tensor) -> None:
    """Copy the `tiles`, int32 [tiles], of the `rows`, int64 [rows, 11], of `CopyTable.tables`, by words of 1, 2, 4, 8
    or 16 bytes."""
    _launch(word, rows, tiles, rows, False)


def compare(word: int, rows: Tensor, tiles: Tensor, first: Tensor) -> None:
    """Set `first`, an int64 scalar, to the number of the first copy that differs, if that is less."""
    _launch(word, rows, tiles, first, True)


def _launch(word: int, rows: Tensor, tiles: Tensor, out: Tensor, comparing: bool) -> None:
    dtype = {1: tl.int8, 2: tl.int16, 4: tl.int32}.get(word, tl.int64)
    launch: Any = _tile[(len(tiles),)]
    launch(rows, tiles, out, WORD=dtype, ALIGNED=word, COMPARE=comparing, BLOCK=BLOCK, num_warps=8)
