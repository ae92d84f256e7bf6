"""Tensors into a bucket's bytes and back."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.plan import Bucket, RefitPlan, Slot
from nemo_rl_lite.refit.report import Named, RefitReport


@dataclass(frozen=True)
class Arrived:
    """A bucket whose bytes lie in `buffer`, uint8 [bucket.nbytes], until the next one is asked for."""

    index: int
    bucket: Bucket
    buffer: Tensor

    def named(self) -> list[Named]:
        """Its tensors by name: views into the buffer, no copies."""
        return [(slot.name, view(self.buffer, slot)) for slot in self.bucket.slots]


def new_buffers(plan: RefitPlan, count: int, device: torch.device) -> Tensor:
    """Room for so many of the plan's buckets at a time, of which it may have fewer: uint8 [count, bytes]."""
    largest = max(bucket.nbytes for bucket in plan.buckets)
    return torch.zeros(min(count, len(plan.buckets)), largest, dtype=torch.uint8, device=device)


def buffer_of(plan: RefitPlan, buffers: Tensor, index: int) -> Tensor:
    """The room for bucket `index` where buckets lie in `buffers` (of `new_buffers`) in turn: uint8 [bucket.nbytes]."""
    return buffers[index % len(buffers), : plan.buckets[index].nbytes]


class Export(Protocol):
    """Where a sender gets the bytes of its buckets from, one after the other: `begin` and `fill` for each in turn.

    Both add the seconds they take to `report`: `iterate` for what is waited for, `pack` for copies.
    """

    def begin(self, index: int, report: RefitReport) -> None:
        """What can be done for bucket `index` while there is no room for it yet."""

    def fill(self, index: int, buffer: Tensor, report: RefitReport) -> None:
        """Put its tensors into `buffer`, uint8 [bucket.nbytes]."""


class Stream:
    """The export of tensors (any device and layout) that come one by one, for a single refit."""

    def __init__(self, plan: RefitPlan, tensors: Iterable[Named]):
        """`tensors`: in the plan's order."""
        self._plan, self._tensors = plan, iter(tensors)
        self._named: list[Named] = []

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
        report.add("pack", clock)


# From this size on a copy of its own is faster than a part of a kernel for many: the device's plain copy reaches more
# of the memory's rate, and there are few enough for the launches not to count.
_LARGE = 1 << 23


class CopyList:
    """Copies from tensors to tensors, to be made any number of times. On a GPU small contiguous ones go in a few
    kernels; one that is not contiguous would make torch copy all of them one by one."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]):
        self._into, self._out_of = list[Tensor](), list[Tensor]()
        self._single = list[tuple[Tensor, Tensor]]()
        for target, source in zip(targets, sources, strict=True):
            is_small = source.numel() * source.element_size() < _LARGE
            if is_small and target.is_contiguous() and source.is_contiguous():
                self._into.append(target)
                self._out_of.append(source)
            else:
                self._single.append((target, source))

    def run(self) -> None:
        if self._into:
            torch._foreach_copy_(self._into, self._out_of)
        for target, source in self._single:
            target.copy_(source)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal to the bit, NaNs included."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """The slot's bytes as a tensor of its dtype and shape."""
    return buffer[slot.offset : slot.offset + slot.nbytes].view(getattr(torch, slot.dtype)).view(slot.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
