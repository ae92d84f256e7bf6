"""Tensors into a bucket's bytes and back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.plan import Bucket, RefitPlan, Slot
from nemo_rl_lite.refit.report import Named


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


class Packer:
    """Puts the tensors of bucket after bucket into `buffers` (of `new_buffers`) in turn. Finds once where each goes."""

    def __init__(self, plan: RefitPlan, buffers: Tensor):
        self._buckets, self._buffers = plan.buckets, buffers
        self._places: dict[int, list[Tensor]] = {}

    def buffer(self, index: int) -> Tensor:
        """The bytes of bucket `index`, uint8 [nbytes]."""
        return self._buffers[index % len(self._buffers), : self._buckets[index].nbytes]

    def pack(self, index: int, tensors: Sequence[Named]) -> Tensor:
        """Copy named tensors (any device and layout) to bucket `index`, which is returned. A tensor's first dimension
        may be in two.

        Raises:
            RefitError: the tensors are not those of the plan.
        """
        slots = self._buckets[index].slots
        if index not in self._places:
            self._places[index] = [view(self.buffer(index), slot) for slot in slots]
        targets = []
        for slot, place, (name, tensor) in zip(slots, self._places[index], tensors, strict=True):
            shape = tensor.shape
            if len(shape) == len(slot.shape) + 1:
                shape = torch.Size((shape[0] * shape[1], *shape[2:]))
            if name != slot.name or shape != place.shape or tensor.dtype != place.dtype:
                planned = f"{slot.name} {list(slot.shape)} {slot.dtype}"
                given = f"{name} {list(tensor.shape)} {dtype_name(tensor.dtype)}"
                raise RefitError(f"the plan expects {planned}, the model gave {given}")
            targets.append(place if place.shape == tensor.shape else place.view(tensor.shape))
        CopyList(targets, [tensor for _, tensor in tensors]).run()
        return self.buffer(index)


class CopyList:
    """Copies from tensors to tensors, to be made any number of times. On a GPU contiguous ones go in a few kernels; one
    that is not would make torch copy all of them one by one."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]):
        self._into, self._out_of = list[Tensor](), list[Tensor]()
        self._single = list[tuple[Tensor, Tensor]]()
        for target, source in zip(targets, sources, strict=True):
            if target.is_contiguous() and source.is_contiguous():
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
