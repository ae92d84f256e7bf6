"""Of which boxes a part of a tensor is made, where it is known of which the whole tensor is."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.refit.boxes import Box, Piece, Places, find_boxes

# With more grains than this, boxes and part have too little in common.
_MOST_GRAINS = 1 << 24


@dataclass(frozen=True)
class Part:
    """A strided part of a contiguous tensor of so many `elements`. `begin` and `strides` in elements, from the tensor's
    first."""

    elements: int
    begin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def boxes_of_part(boxes: Sequence[Box], part: Part) -> list[Box] | None:
    """The boxes that make the part, as a contiguous tensor of its own; None where that is not regular. `boxes`: those
    that make the whole tensor.

    They are found from numbers, as those of the whole tensor were, but of grains: of as many elements as lie next to
    one another wherever they are and wherever they go.
    """
    rows = torch.empty(part.sizes, device="meta").stride()
    runs = [_runs(part.sizes, part.strides, rows)]
    runs += [_runs(box.piece.sizes, box.piece.strides, box.strides) for box in boxes]
    begins = [part.begin, *(begin for box in boxes for begin in (box.begin, box.piece.begin))]
    grain = math.gcd(part.elements, *begins, *(number for each in runs for number in each))
    if part.elements // grain > _MOST_GRAINS:
        return None
    coarse = [_divided(box, grain) for box in boxes]
    # So far apart that no step within a parameter leads into the next one.
    places = Places(1 + max(box.piece.rank for box in boxes), 2 * (1 + max(box.piece.last for box in coarse)))
    numbers = torch.full((part.elements // grain,), -1)
    for box in coarse:
        box.of(numbers).copy_(_numbers(box.piece, places))
    sizes, strides, _ = _axes(grain, part.sizes, part.strides, rows)
    found = find_boxes(numbers.as_strided(sizes, strides, part.begin // grain), places)
    return None if found is None else [_multiplied(box, grain) for box in found]


def _runs(sizes: Sequence[int], *strides: Sequence[int]) -> Iterator[int]:
    """The length of what lies next to one another, and all steps between such runs."""
    run = 1
    for size, *steps in zip(sizes, *strides, strict=True):
        if size > 1 and all(step == 1 for step in steps):
            run = size
        elif size > 1:
            yield from steps
    yield run


def _axes(grain: int, sizes: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Sizes and strides in grains, without axes of one element."""
    axes = list[tuple[int, ...]]()
    for size, *steps in zip(sizes, *strides, strict=True):
        if size > 1 and all(step == 1 for step in steps):
            axes.append((size // grain, *steps))
        elif size > 1:
            axes.append((size, *(step // grain for step in steps)))
    return list(zip(*axes, strict=True)) if axes else [() for _ in range(1 + len(strides))]


def _divided(box: Box, grain: int) -> Box:
    piece = box.piece
    sizes, strides, steps = _axes(grain, piece.sizes, piece.strides, box.strides)
    return Box(Piece(piece.rank, piece.part, piece.begin // grain, sizes, strides), box.begin // grain, steps)


def _multiplied(box: Box, grain: int) -> Box:
    piece = box.piece
    axes = [
        (size, stride * grain, step * grain)
        for size, stride, step in zip(piece.sizes, piece.strides, box.strides, strict=True)
    ]
    if axes and axes[-1][1:] == (grain, grain):
        axes[-1] = axes[-1][0] * grain, 1, 1
    elif grain > 1:
        axes.append((grain, 1, 1))
    sizes, strides, steps = zip(*axes, strict=True) if axes else ((), (), ())
    return Box(Piece(piece.rank, piece.part, piece.begin * grain, sizes, strides), box.begin * grain, steps)


def _numbers(piece: Piece, places: Places) -> Tensor:
    """Those of the piece's elements, in its shape."""
    numbers = torch.tensor(places.begin(piece.part * places.ranks + piece.rank) + piece.begin)
    for size, stride in zip(piece.sizes, piece.strides, strict=True):
        numbers = numbers.unsqueeze(-1) + torch.arange(size) * stride
    return numbers
