"""Which segments fill a window of a tensor, where the segments that fill the whole tensor are known."""

import math
from collections.abc import Iterator, Sequence

import torch

from nemo_rl_lite.refit.layout.views import Axes, Numbering, Segment, StridedView, find_segments

# With more grains than this, segments and window have too little in common.
_MOST_GRAINS = 1 << 24


def segments_of_window(segments: Sequence[Segment], elements: int, window: StridedView) -> list[Segment] | None:
    """The segments that fill the `window` of a tensor, as a contiguous tensor with the window's sizes.

    `segments` fill the whole tensor, which has this many `elements`. Returns None where the window is not regular.

    The segments are found from numbers, as those of the whole tensor were, but a number stands for a grain: elements
    that are neighbours in every parameter, in the tensor and in the window.
    """
    rows = torch.empty(window.sizes, device="meta").stride()
    of_window = list(zip(window.sizes, window.strides, rows, strict=True))
    begins = [window.begin, *(begin for one in segments for begin in (one.source.begin, one.target.begin))]
    runs = [run for axes in (of_window, *(one.axes for one in segments)) for run in _runs(axes)]
    grain = math.gcd(elements, *begins, *runs)
    if elements // grain > _MOST_GRAINS:
        return None
    coarse = [
        Segment.of_axes(one.rank, one.parameter, one.source.begin // grain, one.target.begin // grain, axes)
        for one in segments
        for axes in [_divided(one.axes, grain)]
    ]
    # The factor 2 keeps a step within a parameter from leading into the next parameter.
    largest = 2 * (1 + max(one.source.last for one in coarse))
    numbering = Numbering(1 + max(one.rank for one in segments), largest)
    numbers = torch.full((elements // grain,), -1)
    for one in coarse:
        one.target.of(numbers).copy_(numbering.numbers(one))
    axes = _divided(of_window, grain)
    in_grains = StridedView(window.begin // grain, tuple(axis[0] for axis in axes), tuple(axis[1] for axis in axes))
    found = find_segments(in_grains.of(numbers), numbering)
    return None if found is None else [_multiplied(one, grain) for one in found]


def _runs(axes: Axes) -> Iterator[int]:
    """The length of a run of neighbours, and all strides between such runs."""
    run = 1
    for size, *strides in axes:
        if size > 1 and all(stride == 1 for stride in strides):
            run = size
        elif size > 1:
            yield from strides
    yield run


def _divided(axes: Axes, grain: int) -> Axes:
    """Axes of elements as axes of grains, without those of size 1."""
    return [
        (size // grain, 1, 1) if (stride, step) == (1, 1) else (size, stride // grain, step // grain)
        for size, stride, step in axes
        if size > 1
    ]


def _multiplied(segment: Segment, grain: int) -> Segment:
    axes = [(size, stride * grain, step * grain) for size, stride, step in segment.axes]
    if axes and axes[-1][1:] == (grain, grain):
        axes[-1] = axes[-1][0] * grain, 1, 1
    elif grain > 1:
        axes.append((grain, 1, 1))
    begin, to = segment.source.begin * grain, segment.target.begin * grain
    return Segment.of_axes(segment.rank, segment.parameter, begin, to, axes)
