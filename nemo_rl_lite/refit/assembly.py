"""Buckets put together from the parameters of one or several ranks, by copies and collectives that are planned once.

Each rank of a group packs what others want of its parameters into its section of an arena, the sections are exchanged,
and whoever wants weights copies them from there into the bucket. A bucket that is all of one rank, as in a pipeline
stage, is filled by that rank and broadcast as it is.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.refit.linking import everyones, linked_group
from nemo_rl_lite.refit.packing import CopyList, view
from nemo_rl_lite.refit.plan import RefitPlan
from nemo_rl_lite.refit.report import RefitReport
from nemo_rl_lite.refit.routes import Recipe, Route, make_route


def assemble(
    plan: RefitPlan,
    parameters: Mapping[int, Tensor],
    recipe: Recipe | None,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup],
    timeout_s: float,
) -> "Assembly | None":
    """This rank's part in refits by the `recipe` of each rank that wants weights, None elsewhere; collective over the
    default group. `groups`: there already; others are made where they are needed. None where nobody needs this rank."""
    rank = dist.get_rank()
    own = None if recipe is None else {box.piece.rank for boxes in recipe.values() for box in boxes}
    ranks, group = linked_group(own, groups, timeout_s)
    if not ranks:
        return None
    wanted = dict(everyones((rank, recipe), group)) if group is not None else {rank: recipe}
    recipes = {one: recipe for one, recipe in wanted.items() if recipe is not None}
    return Assembly(plan, parameters, recipes, rank, group, device)


class Assembly:
    """An `Export`: one rank's part in every refit. All ranks of the group begin and fill all buckets in turn."""

    def __init__(
        self,
        plan: RefitPlan,
        parameters: Mapping[int, Tensor],
        recipes: Mapping[int, Recipe],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        """`parameters`: this rank's, by their number in the recipes, contiguous. `recipes`: of every rank that wants
        weights. `rank`: this one, as others are numbered in `recipes`: by torch.distributed's global ranks. `group`:
        None where this rank is alone."""
        self._plan, self._parameters, self._group = plan, parameters, group
        self._ranks = [rank] if group is None else dist.get_process_group_ranks(group)
        # Gloo's all-gather takes several times as long as a broadcast from each rank.
        gather = device.type == "cuda"
        self._routes = [make_route(bucket, recipes, self._ranks, rank, gather) for bucket in plan.buckets]
        self._place, self._wants = self._ranks.index(rank), rank in recipes
        self._arena = torch.empty(self._arena_bytes(), dtype=torch.uint8, device=device)
        self._own: dict[int, CopyList] = {}
        self._into: dict[int, tuple[int, CopyList, CopyList]] = {}
        self._under_way = list[Any]()
        self.refits = 0
        """How many are done."""
        self._at, self._begun = 0, False
        self._release()

    @property
    def collectives(self) -> int:
        """How many a refit takes."""
        return sum(route.collectives for route in self._routes)

    def begin(self, index: int, report: RefitReport) -> None:
        """Pack what others want of this rank, and let it go."""
        clock, route = time.perf_counter(), self._routes[index]
        self._at, self._begun = index, True
        if not self._arena.untyped_storage().nbytes():
            self._arena.untyped_storage().resize_(self._arena.numel())
        if index not in self._own:
            self._own[index] = self._packing(route)
        self._own[index].run()
        if route.whole is None:
            self._under_way = self._exchanged(route)
        report.add("pack", clock)

    def fill(self, index: int, buffer: Tensor | None, report: RefitReport) -> None:
        """`buffer`: none where this rank wants no weights."""
        clock, route = time.perf_counter(), self._routes[index]
        if buffer is None:
            # What passes by has to lie somewhere.
            buffer = self._arena[: self._plan.buckets[index].nbytes if route.whole is not None else 0]
        here, arriving = self._filling(index, buffer)
        here.run()
        if route.whole is not None:
            self._under_way = [self._broadcast(buffer, route.whole)]
        clock = report.add("pack", clock)
        for work in self._under_way:
            # On a GPU only the current stream waits.
            work.wait()
        self._under_way = []
        clock = report.add("iterate", clock)
        arriving.run()
        self._at, self._begun = index + 1, False
        if self._at == len(self._routes):
            self._at, self.refits = 0, self.refits + 1
            self._release()
        report.add("pack", clock)

    def take_part(self) -> None:
        """A whole refit, on a rank that wants no weights."""
        report = RefitReport()
        for index in range(len(self._routes)):
            self.begin(index, report)
            self.fill(index, None, report)

    def finish(self, buffer_of: Callable[[int], Tensor]) -> None:
        """The rest of a refit that this rank gives up while others are in it: the next one begins with all at the first
        bucket. `buffer_of`: memory for a bucket."""
        report = RefitReport()
        for index in range(self._at, len(self._routes)):
            if not self._begun:
                self.begin(index, report)
            self.fill(index, buffer_of(index), report)

    def forget_buffers(self) -> None:
        """Keep no views of memory that was filled, so that it can be given back."""
        self._into = {}

    def _packing(self, route: Route) -> CopyList:
        sources = [piece.of(self._parameters[piece.part]) for piece, _, _ in route.own]
        targets = []
        for source, (_, _, begin) in zip(sources, route.own, strict=True):
            room = self._arena[begin : begin + source.numel() * source.element_size()]
            targets.append(room.view(source.dtype).view(source.shape))
        return CopyList(targets, sources)

    def _filling(self, index: int, buffer: Tensor) -> tuple[CopyList, CopyList]:
        """From here, and from the arena. A bucket mostly comes in the same memory, so the views of it are kept."""
        kept = self._into.get(index)
        if kept is None or kept[0] != buffer.data_ptr():
            route, slots = self._routes[index], dict[str, Tensor]()
            for slot, *_ in (*route.here, *route.arriving):
                if slot.name not in slots:
                    slots[slot.name] = view(buffer, slot)
            here = CopyList(
                [box.of(slots[slot.name]) for slot, box in route.here],
                [box.piece.of(self._parameters[box.piece.part]) for _, box in route.here],
            )
            arrived = []
            for slot, box, begin in route.arriving:
                dtype, sizes = slots[slot.name].dtype, box.piece.sizes
                room = self._arena[begin : begin + math.prod(sizes) * dtype.itemsize]
                arrived.append(room.view(dtype).view(sizes))
            arriving = CopyList([box.of(slots[slot.name]) for slot, box, _ in route.arriving], arrived)
            kept = self._into[index] = buffer.data_ptr(), here, arriving
        return kept[1], kept[2]

    def _exchanged(self, route: Route) -> list[Any]:
        """What is under way."""
        if not route.gathered:
            return [
                self._broadcast(self._arena[begin : begin + size], source)
                for source, (begin, size) in route.sections.items()
            ]
        begin, size = route.sections[self._ranks[self._place]]
        everyones, own = self._arena[: size * len(self._ranks)], self._arena[begin : begin + size]
        return [dist.all_gather_into_tensor(everyones, own, group=self._group, async_op=True)]

    def _broadcast(self, memory: Tensor, source: int) -> Any:
        return dist.broadcast(memory, src=source, group=self._group, async_op=True)

    def _arena_bytes(self) -> int:
        passing = 0 if self._wants else max(bucket.nbytes for bucket in self._plan.buckets)
        return max([passing, *(route.nbytes for route in self._routes)])

    def _release(self) -> None:
        """Between refits a GPU's memory is for others. The views of it stay as they are."""
        if self._arena.is_cuda:
            self._arena.untyped_storage().resize_(0)
