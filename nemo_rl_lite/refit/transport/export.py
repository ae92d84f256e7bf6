"""Buckets from tensors that come one by one."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.layout.packing import CopyList, Named, dtype_name, view
from nemo_rl_lite.refit.layout.plan import RefitPlan
from nemo_rl_lite.refit.transport.report import RefitReport


class Stream:
    """An `Export` of the tensors (any device and layout) that `tensors()` gives, in the plan's order, at each refit."""

    def __init__(self, plan: RefitPlan, tensors: Callable[[], Iterable[Named]], gathers: bool = False):
        """`gathers`: whether giving a tensor is a collective of several ranks."""
        self._plan, self._make, self._gathers = plan, tensors, gathers
        self._tensors: Iterator[Named] = iter(())
        self._named: list[Named] = []

    def start(self) -> None:
        self._tensors = iter(self._make())

    def begin(self, index: int, report: RefitReport) -> None:
        """Raises RefitError: fewer or more tensors than the plan has."""
        clock = time.perf_counter()
        slots = self._plan.buckets[index].slots
        self._named = list(islice(self._tensors, len(slots)))
        if len(self._named) < len(slots):
            missing = slots[len(self._named)].name
            raise RefitError(f"the model gave fewer tensors than the plan has: {missing} is missing")
        extra = next(self._tensors, None) if index == len(self._plan.buckets) - 1 else None
        if extra is not None:
            raise RefitError(f"the model gave more tensors than the plan has: {extra[0]}")
        report.add("iterate", clock)

    def fill(self, index: int, buffer: Tensor, report: RefitReport) -> None:
        """Raises RefitError: the tensors are not those of the plan."""
        clock = time.perf_counter()
        targets = []
        for slot, (name, tensor) in zip(self._plan.buckets[index].slots, self._named, strict=True):
            if (name, tuple(tensor.shape), dtype_name(tensor.dtype)) != (slot.name, slot.shape, slot.dtype):
                planned = f"{slot.name} {list(slot.shape)} {slot.dtype}"
                given = f"{name} {list(tensor.shape)} {dtype_name(tensor.dtype)}"
                raise RefitError(f"the plan expects {planned}, the model gave {given}")
            targets.append(view(buffer, slot))
        CopyList(targets, [tensor for _, tensor in self._named]).run()
        self._named = []
        report.add("pack", clock)

    def finish(self, buffer_of: Callable[[int], Tensor | None]) -> None:
        """Gather the remaining tensors together with the other ranks."""
        if self._gathers:
            for _ in self._tensors:
                pass
