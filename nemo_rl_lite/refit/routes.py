"""How each bucket comes about where the parameters are spread over ranks: what is packed, exchanged and copied."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_lite.refit.boxes import Box, Piece
from nemo_rl_lite.refit.plan import ALIGNMENT, ITEM_BYTES, Bucket, Slot

Recipe = Mapping[str, Sequence[Box]]
"""Of each tensor, where its elements come from."""

# An all-gather takes as much from every rank as from the one with most. Up to this share of waste it is preferred to
# broadcasts, each of which goes out over one rank's links.
_MOST_WASTE = 0.25


@dataclass
class Route:
    """One rank's part in one bucket. Begins and sizes are bytes of the arena, which all ranks lay out alike."""

    sections: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Begin and size of what each rank has packed for others."""
    gathered: bool = False
    """Whether the sections are exchanged at once: every rank has one, all are equally large and in the ranks' order."""
    whole: int | None = None
    """The rank that sends the bucket as it is, where there is one."""
    own: list[tuple[Piece, str, int]] = field(default_factory=list)
    """What others want of this rank: of which dtype, and where it is packed."""
    here: list[tuple[Slot, Box]] = field(default_factory=list)
    """What of the bucket this rank has itself."""
    arriving: list[tuple[Slot, Box, int]] = field(default_factory=list)
    """What it has not, and where that arrives."""

    @property
    def nbytes(self) -> int:
        """Of the arena."""
        return max((begin + size for begin, size in self.sections.values()), default=0)

    @property
    def collectives(self) -> int:
        return 1 if self.gathered or self.whole is not None else len(self.sections)


def make_route(bucket: Bucket, recipes: Mapping[int, Recipe], ranks: Sequence[int], rank: int, gather: bool) -> Route:
    """The part of `rank`, one of `ranks`, where those that want the bucket's tensors have these `recipes`. `gather`:
    whether an all-gather is worth while."""
    boxes = {receiver: list(_boxes(bucket, recipe)) for receiver, recipe in recipes.items()}
    sources = {box.piece.rank for wanted in boxes.values() for _, box in wanted}
    if len(sources) == 1 and not sources >= boxes.keys():
        (source,) = sources
        # That rank need not want it, so the boxes may be another's.
        return Route(whole=source, here=boxes.get(source, next(iter(boxes.values()))) if rank == source else [])
    places = _packed(boxes)
    sizes = {one: sum(map(_room, places[one])) for one in ranks if places[one]}
    route = Route(here=[(slot, box) for slot, box in boxes.get(rank, ()) if box.piece.rank == rank])
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
    route.own = [(piece, dtype, begins[rank] + at) for (piece, dtype), at in places[rank].items()]
    for slot, box in boxes.get(rank, ()):
        source = box.piece.rank
        if source != rank:
            route.arriving.append((slot, box, begins[source] + places[source][box.piece, slot.dtype]))
    return route


def _boxes(bucket: Bucket, recipe: Recipe) -> Iterator[tuple[Slot, Box]]:
    for slot in bucket.slots:
        for box in recipe[slot.name]:
            yield slot, box


def _packed(boxes: Mapping[int, Sequence[tuple[Slot, Box]]]) -> dict[int, dict[tuple[Piece, str], int]]:
    """By rank, the pieces that others want of it, each once, and where in its section they lie."""
    places: dict[int, dict[tuple[Piece, str], int]] = defaultdict(dict)
    used: dict[int, int] = defaultdict(int)
    for receiver, wanted in boxes.items():
        for slot, box in wanted:
            source, key = box.piece.rank, (box.piece, slot.dtype)
            if source != receiver and key not in places[source]:
                places[source][key] = used[source]
                used[source] += _room(key)
    return places


def _room(key: tuple[Piece, str]) -> int:
    piece, dtype = key
    return -(-math.prod(piece.sizes) * ITEM_BYTES[dtype] // ALIGNMENT) * ALIGNMENT
