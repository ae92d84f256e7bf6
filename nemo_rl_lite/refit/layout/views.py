"""Strided views of parameters, found by exporting numbers.

An export that only moves elements is found by exporting the numbers of the elements instead of their values:
`Numbering` numbers the elements of all parameters of all ranks, and `find_segments` reads from the numbers that come
out which window of which parameter fills which window of the exported tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Elements compared at a time: differences of neighbours take the same memory again.
_CHUNK = 1 << 24
# A tensor with more segments, or more runs of neighbours, has no regular layout.
_MOST_SEGMENTS, _MOST_RUNS = 4096, 1 << 22

Axes = Sequence[tuple[int, int, int]]
"""The axes of a segment, outermost first: size, stride in the parameter, stride in the exported tensor."""


@dataclass(frozen=True)
class StridedView:
    """A window of a contiguous tensor. All numbers are in elements; `begin` counts from the tensor's first element."""

    begin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last(self) -> int:
        """The index of the window's last element in the tensor."""
        return self.begin + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def of(self, tensor: Tensor) -> Tensor:
        """The window of a contiguous `tensor`, which shares its memory."""
        return tensor.detach().as_strided(self.sizes, self.strides, tensor.storage_offset() + self.begin)


@dataclass(frozen=True)
class Segment:
    """Elements that an exported tensor takes from one parameter.

    `source` is a window of the parameter number `parameter` of policy rank `rank`, `target` the window of the exported
    tensor that it fills. Both have the same sizes.
    """

    rank: int
    parameter: int
    source: StridedView
    target: StridedView

    @classmethod
    def of_axes(cls, rank: int, parameter: int, begin: int, to: int, axes: Axes) -> "Segment":
        """The segment that begins at `begin` in the parameter and at `to` in the tensor."""
        sizes, strides, steps = zip(*axes, strict=True) if axes else ((), (), ())
        return cls(rank, parameter, StridedView(begin, sizes, strides), StridedView(to, sizes, steps))

    @property
    def axes(self) -> Axes:
        return list(zip(self.source.sizes, self.source.strides, self.target.strides, strict=True))


Recipe = Mapping[str, Sequence[Segment]]
"""For each exported tensor the segments that fill it."""


def source_ranks(recipe: Recipe) -> set[int]:
    """The ranks whose parameters the recipe reads."""
    return {segment.rank for segments in recipe.values() for segment in segments}


@dataclass(frozen=True)
class Numbering:
    """Numbers for the elements of every rank's parameters, none of which has more than `largest` elements."""

    ranks: int
    largest: int

    @property
    def _span(self) -> int:
        # One more than needed: the last element of one parameter and the first of the next are not neighbours.
        return self.largest + 1

    def number(self, rank: int, parameter: int, tensor: Tensor) -> Tensor:
        """The numbers of the elements of `tensor`, the parameter number `parameter` of `rank`: int64 in the tensor's
        shape and on its device."""
        begin = self.begin(parameter * self.ranks + rank)
        return torch.arange(begin, begin + tensor.numel(), device=tensor.device).view(tensor.shape)

    def numbers(self, segment: Segment) -> Tensor:
        """The numbers of the elements of the segment's source, in its shape."""
        numbers = torch.tensor(self.begin(segment.parameter * self.ranks + segment.rank) + segment.source.begin)
        for size, stride, _ in segment.axes:
            numbers = numbers.unsqueeze(-1) + torch.arange(size) * stride
        return numbers

    def unit[Numbers: (int, np.ndarray)](self, numbers: Numbers) -> Numbers:
        """One number for the rank and the parameter together."""
        return numbers // self._span

    def owner(self, unit: int) -> tuple[int, int]:
        """The rank and the parameter of a unit."""
        return unit % self.ranks, unit // self.ranks

    def begin(self, unit: int) -> int:
        """The number of a unit's first element."""
        return unit * self._span


def find_segments(numbers: Tensor, numbering: Numbering) -> list[Segment] | None:
    """The segments that fill a tensor whose elements have these `numbers` (any device).

    Returns None where the elements are not numbers of the `numbering`, or where the layout is not regular enough.
    """
    if numbers.dtype != torch.int64:
        return None
    flat = numbers.reshape(-1)
    if not flat.numel():
        return []
    if int(flat.min()) < 0:
        return None
    step = int(flat[1] - flat[0]) if flat.numel() > 1 else 1
    if step <= 0 or numbering.unit(int(flat[0])) != numbering.unit(int(flat[0]) + step):
        step = 1
    begins = _begins(flat, step)
    if len(begins) > _MOST_RUNS:
        return None
    first = flat[begins].cpu().numpy()
    at = begins.cpu().numpy()
    lengths = np.diff(np.append(at, flat.numel()))
    units = numbering.unit(first)
    if (numbering.unit(first + (lengths - 1) * step) != units).any():
        return None
    segments = list[Segment]()
    for unit in dict.fromkeys(units.tolist()):
        (rank, parameter), own = numbering.owner(unit), np.flatnonzero(units == unit)
        for group in _equal(lengths[own]):
            index = own[group]
            length = int(lengths[index[0]])
            axes: Axes = [(length, step, 1)] if length > 1 else []
            for begin, to, found in _regular(first[index] - numbering.begin(unit), at[index], axes):
                segments.append(Segment.of_axes(rank, parameter, begin, to, found))
                if len(segments) > _MOST_SEGMENTS:
                    return None
    return segments


def _begins(flat: Tensor, step: int) -> Tensor:
    """Indices at which a run begins. In a run each element is `step` more than the one before."""
    begins = [torch.zeros(1, dtype=torch.int64, device=flat.device)]
    for start in range(0, flat.numel() - 1, _CHUNK):
        chunk = flat[start : start + _CHUNK + 1]
        begins.append((chunk[1:] - chunk[:-1] != step).nonzero().flatten() + start + 1)
    return torch.cat(begins)


def _regular(sources: np.ndarray, targets: np.ndarray, axes: Axes) -> Iterator[tuple[int, int, Axes]]:
    """Merge items with the same `axes`, which begin at `sources` and go to `targets`, into fewer with more axes."""
    while len(sources) > 1:
        step, step_to = np.diff(sources), np.diff(targets)
        if step[0] <= 0:
            # A view cannot go backwards.
            yield int(sources[0]), int(targets[0]), axes
            sources, targets = sources[1:], targets[1:]
            continue
        begins = np.append(0, np.flatnonzero((step != step[0]) | (step_to != step_to[0])) + 1)
        lengths = np.diff(np.append(begins, len(sources)))
        outer = (int(step[0]), int(step_to[0]))
        if (lengths != lengths[0]).any():
            for group in _equal(lengths):
                length = int(lengths[group[0]])
                inner: Axes = [(length, *outer), *axes] if length > 1 else axes
                yield from _regular(sources[begins[group]], targets[begins[group]], inner)
            return
        sources, targets, axes = sources[begins], targets[begins], [(int(lengths[0]), *outer), *axes]
    yield int(sources[0]), int(targets[0]), axes


def _equal(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices, in groups of neighbours with equal lengths."""
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(lengths)) + 1)
