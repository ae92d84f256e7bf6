"""Strided copies between parameters, exported tensors and buckets, traced by exporting element numbers.

`IndexTracer` numbers the elements of all ranks' parameters. After exporting these numbers instead of the values,
`trace_strided_copies` finds the parameter window for each window of a tensor. From these segments follow the exchange
of buckets (`plan_exchange`) and an engine rank's parts of a tensor (`segments_of_window`).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.refit.layout import ITEM_BYTES, Bucket, Slot, aligned

# Elements per comparison, which limits its memory.
_CHUNK = 1 << 24
# Limits of a regular layout.
_MOST_SEGMENTS, _MOST_RUNS = 4096, 1 << 22
# An all-gather sends as many bytes from each rank as from the largest, but uses all links; broadcasts use one rank's.
# The all-gather is preferred up to this share of padding.
_MOST_WASTE = 0.25
# Limit of numbers in `segments_of_window`.
_MOST_GRAINS = 1 << 24
Axes = Sequence[tuple[int, int, int]]
"""Axes of a segment, outermost first: size, stride in the parameter, stride in the exported tensor."""


@dataclass(frozen=True)
class StridedView:
    """Window of a contiguous tensor, in elements from the tensor's first."""

    begin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last(self) -> int:
        """Return the tensor index of the window's last element."""
        return self.begin + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def of(self, tensor: Tensor) -> Tensor:
        """Return the window of a contiguous `tensor` as a view."""
        return tensor.detach().as_strided(self.sizes, self.strides, tensor.storage_offset() + self.begin)


@dataclass(frozen=True)
class Segment:
    """Copy from `source`, a window of parameter number `parameter` of policy rank `rank`, to `target`, a window of the
    exported tensor."""

    rank: int
    parameter: int
    source: StridedView
    target: StridedView

    @classmethod
    def of_axes(cls, rank: int, parameter: int, begin: int, to: int, axes: Axes) -> "Segment":
        """Return the segment from `begin` in the parameter to `to` in the tensor."""
        sizes, strides, steps = zip(*axes, strict=True) if axes else ((), (), ())
        return cls(rank, parameter, StridedView(begin, sizes, strides), StridedView(to, sizes, steps))

    @property
    def axes(self) -> Axes:
        return list(zip(self.source.sizes, self.source.strides, self.target.strides, strict=True))


Recipe = Mapping[str, Sequence[Segment]]
"""Segments of each exported tensor."""


def source_ranks(recipe: Recipe) -> set[int]:
    """Return the ranks whose parameters the recipe reads."""
    return {segment.rank for segments in recipe.values() for segment in segments}


@dataclass(frozen=True)
class IndexTracer:
    """Numbers the elements of all ranks' parameters, which have at most `largest` elements each."""

    ranks: int
    largest: int

    @property
    def _span(self) -> int:
        # + 1, so that the last element of a parameter and the first of the next have a gap.
        return self.largest + 1

    def number(self, rank: int, parameter: int, tensor: Tensor) -> Tensor:
        """Return numbers (int64) for the elements of `tensor`, the parameter number `parameter` of `rank`."""
        begin = self.begin(parameter * self.ranks + rank)
        return torch.arange(begin, begin + tensor.numel(), device=tensor.device).view(tensor.shape)

    def numbers(self, segment: Segment) -> Tensor:
        """Return the numbers of the segment's source elements, in its shape."""
        numbers = torch.tensor(self.begin(segment.parameter * self.ranks + segment.rank) + segment.source.begin)
        for size, stride, _ in segment.axes:
            numbers = numbers.unsqueeze(-1) + torch.arange(size) * stride
        return numbers

    def unit[Numbers: (int, np.ndarray)](self, numbers: Numbers) -> Numbers:
        """Return the unit of element numbers: one number per rank and parameter."""
        return numbers // self._span

    def owner(self, unit: int) -> tuple[int, int]:
        """Return a unit's rank and parameter."""
        return unit % self.ranks, unit // self.ranks

    def begin(self, unit: int) -> int:
        """Return the number of a unit's first element."""
        return unit * self._span


def trace_strided_copies(numbers: Tensor, numbering: IndexTracer) -> list[Segment] | None:
    """Return the segments that fill a tensor with these `numbers`. None if they are not of `numbering`, or the layout
    is too irregular."""
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
    """Return the start indices of runs, in which elements increase by `step`."""
    begins = [torch.zeros(1, dtype=torch.int64, device=flat.device)]
    for start in range(0, flat.numel() - 1, _CHUNK):
        chunk = flat[start : start + _CHUNK + 1]
        begins.append((chunk[1:] - chunk[:-1] != step).nonzero().flatten() + start + 1)
    return torch.cat(begins)


def _regular(sources: np.ndarray, targets: np.ndarray, axes: Axes) -> Iterator[tuple[int, int, Axes]]:
    """Merge items with the same `axes`, at `sources` and `targets`, into fewer items with more axes."""
    while len(sources) > 1:
        step, step_to = np.diff(sources), np.diff(targets)
        if step[0] <= 0:
            # Strides of a view are positive.
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
    """Return indices in groups of neighbours with equal lengths."""
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(lengths)) + 1)


@dataclass(frozen=True)
class Packed:
    """Window of a parameter for other ranks, in elements of `dtype`."""

    parameter: int
    source: StridedView
    dtype: str

    @property
    def nbytes(self) -> int:
        """Return the window's padded bytes in the arena."""
        return aligned(math.prod(self.source.sizes) * ITEM_BYTES[self.dtype])


@dataclass
class ExchangePlan:
    """A rank's work for one bucket. Offsets and sizes are in bytes of the arena, the buffer for exchanged windows, with
    the same layout on all ranks."""

    sections: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Offset and size of each rank's packed windows."""
    gathered: bool = False
    """One all-gather exchanges all sections, of equal size and in rank order."""
    whole: int | None = None
    """The rank that broadcasts the whole bucket, if any."""
    own: list[tuple[Packed, int]] = field(default_factory=list)
    """This rank's windows for others, and their offsets."""
    here: list[tuple[Slot, Segment]] = field(default_factory=list)
    """Segments from this rank's parameters."""
    arriving: list[tuple[Slot, Segment, int]] = field(default_factory=list)
    """Segments from other ranks, and their offsets."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arena for the bucket."""
        return max((begin + size for begin, size in self.sections.values()), default=0)

    @property
    def collectives(self) -> int:
        return 1 if self.gathered or self.whole is not None else len(self.sections)


def plan_exchange(
    bucket: Bucket, recipes: Mapping[int, Recipe], ranks: Sequence[int], rank: int, gather: bool
) -> ExchangePlan:
    """Plan the work of `rank`, one of `ranks`. `recipes`: of ranks with consumers. `gather`: allow an all-gather."""
    wanted = {
        receiver: [(slot, segment) for slot in bucket.slots for segment in recipe[slot.name]]
        for receiver, recipe in recipes.items()
    }
    sources = {segment.rank for segments in wanted.values() for _, segment in segments}
    if len(sources) == 1 and not sources >= wanted.keys():
        (source,) = sources
        # If the source has no consumers, use the segments of a rank that has.
        here = wanted.get(source, next(iter(wanted.values()))) if rank == source else []
        return ExchangePlan(whole=source, here=here)
    places = _places(wanted)
    sizes = {one: sum(packed.nbytes for packed in places[one]) for one in ranks if places[one]}
    exchange = ExchangePlan(here=[(slot, segment) for slot, segment in wanted.get(rank, ()) if segment.rank == rank])
    largest = max(sizes.values(), default=0)
    exchange.gathered = gather and 0 < largest * len(ranks) <= (1 + _MOST_WASTE) * sum(sizes.values())
    if exchange.gathered:
        exchange.sections = {one: (index * largest, largest) for index, one in enumerate(ranks)}
    else:
        begin = 0
        for one, size in sizes.items():
            exchange.sections[one] = begin, size
            begin += size
    begins = {one: begin for one, (begin, _) in exchange.sections.items()}
    exchange.own = [(packed, begins[rank] + at) for packed, at in places[rank].items()]
    for slot, segment in wanted.get(rank, ()):
        source = segment.rank
        if source != rank:
            exchange.arriving.append((slot, segment, begins[source] + places[source][_packed(slot, segment)]))
    return exchange


def _places(wanted: Mapping[int, Sequence[tuple[Slot, Segment]]]) -> dict[int, dict[Packed, int]]:
    """Return each rank's distinct windows for others, and their offsets in its section."""
    places: dict[int, dict[Packed, int]] = defaultdict(dict)
    used: dict[int, int] = defaultdict(int)
    for receiver, segments in wanted.items():
        for slot, segment in segments:
            source, packed = segment.rank, _packed(slot, segment)
            if source != receiver and packed not in places[source]:
                places[source][packed] = used[source]
                used[source] += packed.nbytes
    return places


def _packed(slot: Slot, segment: Segment) -> Packed:
    return Packed(segment.parameter, segment.source, slot.dtype)


def segments_of_window(segments: Sequence[Segment], elements: int, window: StridedView) -> list[Segment] | None:
    """Return the segments that fill the `window` of a tensor, as a contiguous tensor; None if it is too irregular.

    `segments` fill the whole tensor of `elements` elements. As in `trace_strided_copies`, the result is traced from
    numbers. Here a number represents a grain: elements that are neighbours in parameters, tensor and window.
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
    # The factor 2 prevents a step within one parameter from reaching the next.
    largest = 2 * (1 + max(one.source.last for one in coarse))
    numbering = IndexTracer(1 + max(one.rank for one in segments), largest)
    numbers = torch.full((elements // grain,), -1)
    for one in coarse:
        one.target.of(numbers).copy_(numbering.numbers(one))
    axes = _divided(of_window, grain)
    in_grains = StridedView(window.begin // grain, tuple(axis[0] for axis in axes), tuple(axis[1] for axis in axes))
    found = trace_strided_copies(in_grains.of(numbers), numbering)
    return None if found is None else [_multiplied(one, grain) for one in found]


def _runs(axes: Axes) -> Iterator[int]:
    """Yield the length of a run of neighbours, and all strides between runs."""
    run = 1
    for size, *strides in axes:
        if size > 1 and all(stride == 1 for stride in strides):
            run = size
        elif size > 1:
            yield from strides
    yield run


def _divided(axes: Axes, grain: int) -> Axes:
    """Convert axes from elements to grains, without those of size 1."""
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
