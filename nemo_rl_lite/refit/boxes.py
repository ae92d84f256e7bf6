"""Where the elements of an exported tensor come from, as a few regular parts of parameters.

An export that only moves elements is found by exporting their places instead of their values: `Places` numbers the
elements of all parameters of all ranks, and `find_boxes` sees from the numbers that come out which part of which
parameter lies where in the tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Elements looked at together: differences of neighbours take as much memory again.
_CHUNK = 1 << 24
# More parts than this a tensor, or more runs of neighbours, are no regular layout.
_MOST_BOXES, _MOST_RUNS = 4096, 1 << 22

Axes = tuple[tuple[int, int, int], ...]
"""Of a box: size, stride in the parameter, stride in the tensor."""


@dataclass(frozen=True)
class Piece:
    """A strided part of the parameter number `part` of the rank `rank`. In elements, from the parameter's first."""

    rank: int
    part: int
    begin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last(self) -> int:
        """The place of its last element."""
        return self.begin + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def of(self, parameter: Tensor) -> Tensor:
        """The view of a contiguous parameter."""
        return parameter.detach().as_strided(self.sizes, self.strides, parameter.storage_offset() + self.begin)


@dataclass(frozen=True)
class Box:
    """A piece, and the strided part of a contiguous tensor that it fills. In elements, from the tensor's first."""

    piece: Piece
    begin: int
    strides: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a contiguous tensor."""
        return tensor.as_strided(self.piece.sizes, self.strides, tensor.storage_offset() + self.begin)


@dataclass(frozen=True)
class Places:
    """Numbers for the elements of every rank's parameters, none of which has more than `largest`."""

    ranks: int
    largest: int

    @property
    def _span(self) -> int:
        # One more than needed: the last element of one parameter and the first of the next are no neighbours.
        return self.largest + 1

    def number(self, rank: int, part: int, parameter: Tensor) -> Tensor:
        """Those of the parameter number `part` of `rank`: int64 in its shape and on its device."""
        begin = (part * self.ranks + rank) * self._span
        places = torch.arange(begin, begin + parameter.numel(), device=parameter.device)
        return places.view(parameter.shape)

    def unit[Numbers: (int, np.ndarray)](self, numbers: Numbers) -> Numbers:
        """One number for rank and parameter."""
        return numbers // self._span

    def owner(self, unit: int) -> tuple[int, int]:
        """Rank and parameter of a unit."""
        return unit % self.ranks, unit // self.ranks

    def begin(self, unit: int) -> int:
        """The number of a unit's first element."""
        return unit * self._span


def find_boxes(numbers: Tensor, places: Places) -> list[Box] | None:
    """The boxes that make the tensor whose elements were given the `numbers`, any device; None where the elements are
    not numbers of `places`, or where the layout is not that regular."""
    if numbers.dtype != torch.int64:
        return None
    flat = numbers.reshape(-1)
    if not flat.numel():
        return []
    if int(flat.min()) < 0:
        return None
    step = int(flat[1] - flat[0]) if flat.numel() > 1 else 1
    if step <= 0 or places.unit(int(flat[0])) != places.unit(int(flat[0]) + step):
        step = 1
    begins = _begins(flat, step)
    if len(begins) > _MOST_RUNS:
        return None
    first = flat[begins].cpu().numpy()
    at = begins.cpu().numpy()
    lengths = np.diff(np.append(at, flat.numel()))
    units = places.unit(first)
    if (places.unit(first + (lengths - 1) * step) != units).any():
        return None
    boxes = list[Box]()
    for unit in dict.fromkeys(units.tolist()):
        (rank, part), own = places.owner(unit), np.flatnonzero(units == unit)
        for group in _equal(lengths[own]):
            index = own[group]
            length = int(lengths[index[0]])
            axes: Axes = ((length, step, 1),) if length > 1 else ()
            for begin, to, found in _regular(first[index] - places.begin(unit), at[index], axes):
                sizes, strides, steps = zip(*found, strict=True) if found else ((), (), ())
                boxes.append(Box(Piece(rank, part, begin, sizes, strides), to, steps))
                if len(boxes) > _MOST_BOXES:
                    return None
    return boxes


def _begins(flat: Tensor, step: int) -> Tensor:
    """Where the runs of elements begin of which each is `step` from the one before."""
    begins = [torch.zeros(1, dtype=torch.int64, device=flat.device)]
    for start in range(0, flat.numel() - 1, _CHUNK):
        chunk = flat[start : start + _CHUNK + 1]
        begins.append((chunk[1:] - chunk[:-1] != step).nonzero().flatten() + start + 1)
    return torch.cat(begins)


def _regular(places: np.ndarray, to: np.ndarray, axes: Axes) -> Iterator[tuple[int, int, Axes]]:
    """Items with these `axes` each, the next of which lie at `places` and go `to`, as fewer items with more axes."""
    while len(places) > 1:
        step, step_to = np.diff(places), np.diff(to)
        if step[0] <= 0:
            # No view goes backwards.
            yield int(places[0]), int(to[0]), axes
            places, to = places[1:], to[1:]
            continue
        begins = np.append(0, np.flatnonzero((step != step[0]) | (step_to != step_to[0])) + 1)
        lengths = np.diff(np.append(begins, len(places)))
        outer = (int(step[0]), int(step_to[0]))
        if (lengths != lengths[0]).any():
            for group in _equal(lengths):
                length = int(lengths[group[0]])
                inner: Axes = ((length, *outer), *axes) if length > 1 else axes
                yield from _regular(places[begins[group]], to[begins[group]], inner)
            return
        places, to, axes = places[begins], to[begins], ((int(lengths[0]), *outer), *axes)
    yield int(places[0]), int(to[0]), axes


def _equal(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices of neighbours that are equally long."""
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(lengths)) + 1)
