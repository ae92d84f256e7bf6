"""How each bucket is filled where the parameters are spread over ranks: what is packed, exchanged and copied."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_lite.refit.layout.plan import ITEM_BYTES, Bucket, Slot, aligned
from nemo_rl_lite.refit.layout.views import Recipe, Segment, StridedView

# An all-gather takes from every rank as much as from the rank with most. It is preferred to broadcasts, each of which
# goes out over one rank's links, up to this share of wasted bytes.
_MOST_WASTE = 0.25


@dataclass(frozen=True)
class Packed:
    """A window of a rank's parameter that other ranks want, in elements of `dtype`."""

    parameter: int
    source: StridedView
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes that the window takes in a section of the arena, with padding."""
        return aligned(math.prod(self.source.sizes) * ITEM_BYTES[self.dtype])


@dataclass
class Route:
    """One rank's share of the work for one bucket. Begins and sizes are bytes of the arena, the buffer for what is
    exchanged, which all ranks lay out alike."""

    sections: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rank -> begin and size of what it has packed for others."""
    gathered: bool = False
    """Whether one all-gather exchanges the sections: every rank has one, equally large and in the ranks' order."""
    whole: int | None = None
    """The rank that broadcasts the bucket as it is, if there is one."""
    own: list[tuple[Packed, int]] = field(default_factory=list)
    """What other ranks want of this rank, and where in the arena it is packed."""
    here: list[tuple[Slot, Segment]] = field(default_factory=list)
    """The segments of the bucket whose parameters this rank has."""
    arriving: list[tuple[Slot, Segment, int]] = field(default_factory=list)
    """The segments that other ranks have, and where in the arena they arrive."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that the bucket needs."""
        return max((begin + size for begin, size in self.sections.values()), default=0)

    @property
    def collectives(self) -> int:
        return 1 if self.gathered or self.whole is not None else len(self.sections)


def make_route(bucket: Bucket, recipes: Mapping[int, Recipe], ranks: Sequence[int], rank: int, gather: bool) -> Route:
    """The route of `rank`, one of `ranks`. `recipes`: of each rank that wants the bucket. `gather`: whether an
    all-gather is worthwhile."""
    wanted = {
        receiver: [(slot, segment) for slot in bucket.slots for segment in recipe[slot.name]]
        for receiver, recipe in recipes.items()
    }
    sources = {segment.rank for segments in wanted.values() for _, segment in segments}
    if len(sources) == 1 and not sources >= wanted.keys():
        (source,) = sources
        # The source need not want the bucket itself, so its segments may be those of another rank.
        return Route(whole=source, here=wanted.get(source, next(iter(wanted.values()))) if rank == source else [])
    places = _places(wanted)
    sizes = {one: sum(packed.nbytes for packed in places[one]) for one in ranks if places[one]}
    route = Route(here=[(slot, segment) for slot, segment in wanted.get(rank, ()) if segment.rank == rank])
    largest = max(sizes.values(), default=0)
    route.gathered = gather and 0 < largest * len(ranks) <= (1 + _MOST_WASTE) * sum(sizes.values())
    if route.gathered:
        route.sections = {one: (index * largest, largest) for index, one in enumerate(ranks)}
    else:
        begin = 0
        for one, size in sizes.items():
            route.sections[one] = begin, size
            begin += size
    begins = {one: begin for one, (begin, _) in route.sections.items()}
    route.own = [(packed, begins[rank] + at) for packed, at in places[rank].items()]
    for slot, segment in wanted.get(rank, ()):
        source = segment.rank
        if source != rank:
            route.arriving.append((slot, segment, begins[source] + places[source][_packed(slot, segment)]))
    return route


def _places(wanted: Mapping[int, Sequence[tuple[Slot, Segment]]]) -> dict[int, dict[Packed, int]]:
    """Rank -> what other ranks want of it, each window once, and where in the rank's section it lies."""
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
