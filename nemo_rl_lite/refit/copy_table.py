"""Table of the copies between two sets of memory, which one kernel makes, and another compares.

A row is a strided copy: `outer` times `rows` runs of neighbouring bytes. Addresses of sources may change between
refits. The table then changes by a few operations on arrays, without Python code per copy.
"""

import ctypes
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.refit.trace import StridedView

# Columns of a row, all int64. Strides and the source's `begin` are in bytes; `target` is an address.
_COLUMNS = ["base", "begin", "target", "outer", "rows", "run", "outer_from", "outer_to", "row_from", "row_to", "copy"]
# Bytes that a kernel loads at once, most first.
_WORDS = (16, 8, 4, 2, 1)

Copy = tuple[int, StridedView, Tensor]
"""Number of the source's base, the source's window there in elements of the target's dtype, and the target."""


class CopyTable:
    """Copies into `targets`, which must not move, from windows of contiguous memory at given base addresses."""

    def __init__(self, copies: Sequence[Copy]):
        rows = [row for index, copy in enumerate(copies) for row in _rows(index, *copy)]
        table = np.array(rows, dtype=np.int64).reshape(-1, len(_COLUMNS))
        self._columns = dict(zip(_COLUMNS, table.T, strict=True))
        # Keeps the memory.
        self._targets = [target for _, _, target in copies]
        self._ready: tuple[np.ndarray, list[tuple[int, Tensor, Tensor]]] | None = None

    def run(self, bases: np.ndarray) -> None:
        """Copy from the `bases`, int64 [n] addresses, in the current stream."""
        if self._on_gpu:
            from nemo_rl_lite.refit.copy_kernel import copy

            for word, rows, tiles in self._prepared(bases):
                copy(word, rows, tiles)
            return
        for _, source, target in self._views(bases):
            target[...] = source

    def first_differing(self, bases: np.ndarray) -> int | None:
        """Return the number of the first copy whose target is not bitwise identical to its source. Synchronizes."""
        if self._on_gpu:
            from nemo_rl_lite.refit.copy_kernel import compare

            first = torch.full((), len(self._targets), device=self._targets[0].device)
            for word, rows, tiles in self._prepared(bases):
                compare(word, rows, tiles, first)
            differing = int(first)
            return differing if differing < len(self._targets) else None
        return next((copy for copy, source, target in self._views(bases) if not np.array_equal(source, target)), None)

    @property
    def _on_gpu(self) -> bool:
        return bool(self._targets) and self._targets[0].is_cuda

    def _prepared(self, bases: np.ndarray) -> list[tuple[int, Tensor, Tensor]]:
        """Return the kernel's table for each word size: bytes, rows, and the row of each tile."""
        if self._ready is None or not np.array_equal(self._ready[0], bases):
            device = self._targets[0].device
            tables = [(word, *map(torch.from_numpy, table)) for word, *table in self.tables(bases)]
            self._ready = bases.copy(), [(word, rows.to(device), tiles.to(device)) for word, rows, tiles in tables]
        return self._ready[1]

    def tables(self, bases: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the word size in bytes, rows for `copy_kernel` (int64 [n, 11]) and the row of each tile (int32)."""
        from nemo_rl_lite.refit.copy_kernel import BLOCK

        one = self._columns
        source = bases[one["base"]] + one["begin"]
        # Strides without a use are 0, so all of a row's numbers share its word size.
        strides = [one[name] for name in ("outer_from", "outer_to", "row_from", "row_to", "run")]
        together = np.bitwise_or.reduce([source, one["target"], *strides])
        words = np.minimum(together & -together, _WORDS[0])
        for word in _WORDS:
            own = np.flatnonzero(words == word)
            unit = min(word, 8)
            total = (one["outer"] * one["rows"] * one["run"])[own] // unit
            count = -(-total // BLOCK)
            if count.sum():
                first = np.cumsum(count) - count
                shapes = [one["run"][own] // unit, one["rows"][own]]
                steps = [column[own] // unit for column in strides[:4]]
                rows = np.stack([source[own], one["target"][own], total, first, *shapes, *steps, one["copy"][own]], 1)
                yield word, rows, np.repeat(np.arange(len(own), dtype=np.int32), count)

    def _views(self, bases: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the copy, and views of the source's and the target's bytes for each row."""
        for base, begin, target, outer, rows, run, outer_from, outer_to, row_from, row_to, copy in zip(
            *(column.tolist() for column in self._columns.values()), strict=True
        ):
            shape = outer, rows, run
            source = _bytes_at(int(bases[base]) + begin, shape, (outer_from, row_from, 1))
            yield copy, source, _bytes_at(target, shape, (outer_to, row_to, 1))


def _rows(copy: int, base: int, source: StridedView, target: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the table's rows of a copy."""
    size = target.element_size()
    axes: list[tuple[int, int, int]] = []
    for length, *strides in zip(source.sizes, source.strides, target.stride(), strict=True):
        if length == 1:
            continue
        step, step_to = (stride * size for stride in strides)
        if axes and axes[-1][1:] == (length * step, length * step_to):
            axes[-1] = axes[-1][0] * length, step, step_to
        else:
            axes.append((length, step, step_to))
    run = size
    if axes and axes[-1][1:] == (size, size):
        run = axes.pop()[0] * size
    *others, outer, row = [(1, 0, 0), (1, 0, 0), *axes]
    for index in itertools.product(*(range(length) for length, _, _ in others)):
        begin = source.begin * size + sum(at * step for at, (_, step, _) in zip(index, others, strict=True))
        to = target.data_ptr() + sum(at * step for at, (_, _, step) in zip(index, others, strict=True))
        yield base, begin, to, outer[0], row[0], run, *outer[1:], *row[1:], copy


def _bytes_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Return a view of host memory, uint8 in this shape; strides in bytes."""
    if 0 in shape:
        return np.empty(shape, dtype=np.uint8)
    extent = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(address))
    return np.lib.stride_tricks.as_strided(memory, shape, strides)
