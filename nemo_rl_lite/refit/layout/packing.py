"""Tensors into a bucket's bytes and back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import foreach_copy
from nemo_rl_lite.refit.layout.plan import Bucket, RefitPlan, Slot

Named = tuple[str, Tensor]
# A copy of this many bytes or more is made by itself: the device's plain copy reaches more of the memory's rate than a
# kernel for many tensors, and there are few enough for the launches not to count.
_LARGE = 1 << 23


@dataclass(frozen=True)
class Arrived:
    """A bucket whose bytes lie in `buffer`, uint8 [bucket.nbytes], until the next bucket is asked for."""

    index: int
    bucket: Bucket
    buffer: Tensor

    def named(self) -> list[Named]:
        """The bucket's tensors by name: views of the buffer, not copies."""
        return [(slot.name, view(self.buffer, slot)) for slot in self.bucket.slots]


def new_buffers(plan: RefitPlan, count: int, device: torch.device) -> Tensor:
    """Memory for `count` of the plan's buckets at a time, or for all if it has fewer: uint8 [count, bytes]."""
    largest = max(bucket.nbytes for bucket in plan.buckets)
    return torch.zeros(min(count, len(plan.buckets)), largest, dtype=torch.uint8, device=device)


def buffer_of(plan: RefitPlan, buffers: Tensor, index: int) -> Tensor:
    """The memory of bucket `index`, uint8 [bucket.nbytes], where buckets take `buffers` (of `new_buffers`) in turn."""
    return buffers[index % len(buffers), : plan.buckets[index].nbytes]


class CopyList:
    """Copies from tensors to tensors that can be made repeatedly. On a GPU small contiguous ones go in a few kernels;
    a single tensor that is not contiguous would make torch copy all of them one by one."""

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
            foreach_copy(self._into, self._out_of)
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
