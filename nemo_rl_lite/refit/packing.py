"""Tensors into a bucket's bytes and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_

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


def pack(bucket: Bucket, tensors: Sequence[Named], buffer: Tensor) -> None:
    """Copy named tensors (any device and layout) to their places in `buffer`. A tensor's first dimension may be in two.

    Raises:
        RefitError: the tensors are not those of the plan.
    """
    places = []
    for slot, (name, tensor) in zip(bucket.slots, tensors, strict=True):
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        joined = (shape[0] * shape[1], *shape[2:]) if len(shape) == len(slot.shape) + 1 else shape
        if (name, joined, dtype) != (slot.name, slot.shape, slot.dtype):
            planned = f"{slot.name} {list(slot.shape)} {slot.dtype}"
            raise RefitError(f"the plan expects {planned}, the model gave {name} {list(shape)} {dtype}")
        places.append(view(buffer, slot).view(shape))
    copy_all(places, [tensor for _, tensor in tensors])


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target. On a GPU contiguous tensors go in a few kernels; one that is not would make
    torch copy all of them one by one."""
    pairs = list(zip(targets, sources, strict=True))
    together = [target.is_contiguous() and source.is_contiguous() for target, source in pairs]
    if any(together):
        into, out_of = zip(*compress(pairs, together), strict=True)
        torch._foreach_copy_(list(into), list(out_of))
    for target, source in compress(pairs, map(not_, together)):
        target.copy_(source)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal to the bit, NaNs included."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """The slot's bytes as a tensor of its dtype and shape."""
    return buffer[slot.offset : slot.offset + slot.nbytes].view(getattr(torch, slot.dtype)).view(slot.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
