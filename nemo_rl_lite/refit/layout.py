"""The bucket plan of a refit, which says where each tensor lies in which bucket, and copies into and out of buckets.

The producer makes the plan once. Every consumer has a copy and compares its hash before the first weight.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import foreach_copy

Named = tuple[str, Tensor]
ALIGNMENT = 512
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in its bucket; `offset` and `nbytes` are in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together in `nbytes` bytes, padding included."""

    slots: tuple[Slot, ...]
    nbytes: int

    def describe(self) -> str:
        first, last = self.slots[0].name, self.slots[-1].name
        return first if len(self.slots) == 1 else f"{first} ... {last} ({len(self.slots)} tensors)"


@dataclass(frozen=True)
class RefitPlan:
    """All buckets, in the order in which they are sent."""

    buckets: tuple[Bucket, ...]

    @cached_property
    def digest(self) -> bytes:
        """Return the SHA-256 of everything that the two sides must agree on: 32 bytes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def names(self) -> list[str]:
        return [slot.name for bucket in self.buckets for slot in bucket.slots]


def make_plan(tensors: Iterable[tuple[str, tuple[int, ...], str]], bucket_bytes: int) -> RefitPlan:
    """Lay `(name, shape, dtype)` tensors into buckets of at most `bucket_bytes` bytes, in the order given.

    Each tensor starts at a multiple of 512 bytes. A tensor larger than a bucket gets a bucket to itself.

    Raises:
        ValueError: an empty list, a repeated name, an unknown dtype, a bucket size below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket needs at least 1 byte, got {bucket_bytes}")
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    used = 0
    seen: set[str] = set()
    for name, shape, dtype in tensors:
        if name in seen:
            raise ValueError(f"tensor {name} is in the model twice")
        if dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {name} has dtype {dtype}, which a refit cannot carry")
        seen.add(name)
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        if slots and used + nbytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), used))
            slots, used = [], 0
        slots.append(Slot(name, tuple(shape), dtype, used, nbytes))
        used += aligned(nbytes)
    if slots:
        buckets.append(Bucket(tuple(slots), used))
    if not buckets:
        raise ValueError("the model has no tensors to send")
    return RefitPlan(tuple(buckets))


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of 512."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# A copy of this many bytes or more is launched alone: a plain copy is faster than a kernel for many tensors, and large
# tensors are few.
_LARGE = 1 << 23


@dataclass(frozen=True)
class ReceivedBucket:
    """A bucket whose bytes are in `buffer`, uint8 [bucket.nbytes], until the next bucket is asked for."""

    index: int
    bucket: Bucket
    buffer: Tensor

    def named(self) -> list[Named]:
        """Return the bucket's tensors by name: views of the buffer, not copies."""
        return [(slot.name, view(self.buffer, slot)) for slot in self.bucket.slots]


def new_buffers(plan: RefitPlan, count: int, device: torch.device) -> Tensor:
    """Allocate memory for `count` of the plan's buckets, or for all if it has fewer: uint8 [count, bytes]."""
    largest = max(bucket.nbytes for bucket in plan.buckets)
    return torch.zeros(min(count, len(plan.buckets)), largest, dtype=torch.uint8, device=device)


def buffer_of(plan: RefitPlan, buffers: Tensor, index: int) -> Tensor:
    """Return the memory of bucket `index`, uint8 [bucket.nbytes]; buckets use `buffers` (of `new_buffers`)
    round-robin."""
    return buffers[index % len(buffers), : plan.buckets[index].nbytes]


class CopyList:
    """Copies between tensors that can be repeated. On a GPU, small contiguous ones go in a few kernels; one strided
    tensor among them would make torch copy all of them one by one."""

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
    """Return whether two tensors of one dtype and shape are equal to the bit, NaNs included."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """Return the slot's bytes as a tensor of its dtype and shape."""
    return buffer[slot.offset : slot.offset + slot.nbytes].view(getattr(torch, slot.dtype)).view(slot.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
