"""Buckets put together from the parameters of one or several ranks, by copies and collectives that are planned once.

Each rank of a group packs what other ranks want of its parameters into its section of an arena, the sections are
exchanged, and each rank that wants weights copies them from the arena into the bucket. A bucket that only one rank has
parameters of, as in a pipeline stage, is filled by that rank and broadcast as it is.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.refit.layout.packing import CopyList, view
from nemo_rl_lite.refit.layout.plan import RefitPlan
from nemo_rl_lite.refit.layout.routes import Route, make_route
from nemo_rl_lite.refit.layout.views import Recipe, source_ranks
from nemo_rl_lite.refit.transport.rank_groups import all_gather, group_by_need
from nemo_rl_lite.refit.transport.report import RefitReport


def assemble(
    plan: RefitPlan,
    parameters: Mapping[int, Tensor],
    recipe: Recipe | None,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup],
    timeout_s: float,
) -> "Assembly | None":
    """The assembly of this rank; collective over the default group.

    `recipe`: None if this rank wants no weights. `groups`: existing process groups, which are used where they fit.
    Returns None if no rank needs this one.
    """
    rank = dist.get_rank()
    ranks, group = group_by_need(None if recipe is None else source_ranks(recipe), groups, timeout_s)
    if not ranks:
        return None
    wanted = dict(all_gather((rank, recipe), group)) if group is not None else {rank: recipe}
    recipes = {one: recipe for one, recipe in wanted.items() if recipe is not None}
    return Assembly(plan, parameters, recipes, rank, group, device)


class Assembly:
    """An `Export`. All ranks of the group begin and fill all buckets in turn, on a rank that wants no weights with None
    for the buffer."""

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
        weights. Ranks are torch.distributed's global ones. `group`: None for a single rank."""
        self._plan, self._parameters, self._group = plan, parameters, group
        self._ranks = [rank] if group is None else dist.get_process_group_ranks(group)
        # Gloo's all-gather takes several times as long as a broadcast from each rank.
        gather = device.type == "cuda"
        self._routes = [make_route(bucket, recipes, self._ranks, rank, gather) for bucket in plan.buckets]
        self._rank, self._wants = rank, rank in recipes
        self._arena = torch.empty(self._arena_bytes(), dtype=torch.uint8, device=device)
        self._own: dict[int, CopyList] = {}
        self._into: dict[int, tuple[int, CopyList, CopyList]] = {}
        self._under_way = list[Any]()
        # Buckets of this refit that are begun and filled.
        self._begun = self._filled = 0
        self._release()

    @property
    def collectives(self) -> int:
        """The number of collectives of a refit."""
        return sum(route.collectives for route in self._routes)

    def start(self) -> None:
        self._begun = self._filled = 0
        if not self._arena.untyped_storage().nbytes():
            self._arena.untyped_storage().resize_(self._arena.numel())

    def begin(self, index: int, report: RefitReport) -> None:
        """Pack what other ranks want of this rank, and start to exchange it."""
        clock, route = time.perf_counter(), self._routes[index]
        self._begun = index + 1
        if index not in self._own:
            self._own[index] = self._packing(route)
        self._own[index].run()
        if route.whole is None:
            self._under_way = self._exchanged(route)
        report.add("pack", clock)

    def fill(self, index: int, buffer: Tensor | None, report: RefitReport) -> None:
        """See `Export.fill`."""
        clock, route = time.perf_counter(), self._routes[index]
        if buffer is None:
            # A rank that wants no weights needs memory for what is broadcast all the same.
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
        self._filled = index + 1
        if self._filled == len(self._routes):
            self._release()
        report.add("pack", clock)

    def finish(self, buffer_of: Callable[[int], Tensor | None]) -> None:
        """See `Export.finish`."""
        report = RefitReport()
        for index in range(self._filled, len(self._routes)):
            if self._begun == index:
                self.begin(index, report)
            self.fill(index, buffer_of(index), report)

    def _packing(self, route: Route) -> CopyList:
        sources = [packed.source.of(self._parameters[packed.parameter]) for packed, _ in route.own]
        targets = [self._in_arena(begin, source) for source, (_, begin) in zip(sources, route.own, strict=True)]
        return CopyList(targets, sources)

    def _filling(self, index: int, buffer: Tensor) -> tuple[CopyList, CopyList]:
        """Copies into the buffer from this rank's parameters, and from the arena. A bucket mostly comes in the same
        memory, so the views of it are kept."""
        kept = self._into.get(index)
        if kept is None or kept[0] != buffer.data_ptr():
            route = self._routes[index]
            slots = {slot: view(buffer, slot) for slot in {slot for slot, *_ in (*route.here, *route.arriving)}}
            here = CopyList(
                [segment.target.of(slots[slot]) for slot, segment in route.here],
                [segment.source.of(self._parameters[segment.parameter]) for _, segment in route.here],
            )
            targets = [segment.target.of(slots[slot]) for slot, segment, _ in route.arriving]
            begins = [begin for *_, begin in route.arriving]
            arrived = [self._in_arena(begin, target) for begin, target in zip(begins, targets, strict=True)]
            kept = self._into[index] = buffer.data_ptr(), here, CopyList(targets, arrived)
        return kept[1], kept[2]

    def _in_arena(self, begin: int, like: Tensor) -> Tensor:
        """Contiguous memory of the arena, with the shape and the dtype of another tensor."""
        memory = self._arena[begin : begin + math.prod(like.shape) * like.element_size()]
        return memory.view(like.dtype).view(like.shape)

    def _exchanged(self, route: Route) -> list[Any]:
        """The exchange of the sections, which is under way."""
        if not route.gathered:
            return [
                self._broadcast(self._arena[begin : begin + size], source)
                for source, (begin, size) in route.sections.items()
            ]
        begin, size = route.sections[self._rank]
        together, own = self._arena[: size * len(self._ranks)], self._arena[begin : begin + size]
        return [dist.all_gather_into_tensor(together, own, group=self._group, async_op=True)]

    def _broadcast(self, memory: Tensor, source: int) -> Any:
        return dist.broadcast(memory, src=source, group=self._group, async_op=True)

    def _arena_bytes(self) -> int:
        broadcast = 0 if self._wants else max(bucket.nbytes for bucket in self._plan.buckets)
        return max([broadcast, *(route.nbytes for route in self._routes)])

    def _release(self) -> None:
        """Give back a GPU's memory between refits; views of it stay valid for the next refit."""
        if self._arena.is_cuda:
            self._arena.untyped_storage().resize_(0)
