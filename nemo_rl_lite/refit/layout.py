"""Bucket plan of a refit: each tensor's bucket and offset; and copies of tensors.

The producer makes the plan once. Consumers have a copy and compare its hash at each refit, before the first weight.
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
_DTYPES = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
ITEM_BYTES = {name: getattr(torch, name).itemsize for name in _DTYPES.split()}


@dataclass(frozen=True)
class Slot:
    """A tensor's place in its bucket; `offset` and `nbytes` are in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together, in `nbytes` with padding."""

    slots: tuple[Slot, ...]
    nbytes: int

    def describe(self) -> str:
        first, last = self.slots[0].name, self.slots[-1].name
        return first if len(self.slots) == 1 else f"{first} ... {last} ({len(self.slots)} tensors)"


@dataclass(frozen=True)
class RefitPlan:
    """All buckets in sending order."""

    buckets: tuple[Bucket, ...]

    @cached_property
    def digest(self) -> bytes:
        """Return the plan's SHA-256, 32 bytes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


def make_plan(tensors: Iterable[tuple[str, tuple[int, ...], str]], bucket_bytes: int) -> RefitPlan:
    """Place `(name, shape, dtype)` tensors in buckets of at most `bucket_bytes`, in order and aligned to 512 bytes.

    A larger tensor gets a separate bucket. Raises ValueError: no tensors, a repeated name, an unknown dtype, or a
    bucket size below 1.
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


# Larger copies are launched separately, because a plain copy is faster than a kernel for many tensors.
_LARGE = 1 << 23


@dataclass(frozen=True)
class ReceivedBucket:
    """Bucket with its bytes in `buffer`, uint8 [bucket.nbytes], until the next bucket is received."""

    index: int
    bucket: Bucket
    buffer: Tensor

    def named(self) -> list[Named]:
        """Return the bucket's tensors by name, as views of the buffer."""
        return [(slot.name, view(self.buffer, slot)) for slot in self.bucket.slots]


def new_buffers(plan: RefitPlan, count: int, device: torch.device) -> Tensor:
    """Allocate memory for at most `count` of the plan's buckets, uint8 [count, bytes]."""
    largest = max(bucket.nbytes for bucket in plan.buckets)
    return torch.zeros(min(count, len(plan.buckets)), largest, dtype=torch.uint8, device=device)


def buffer_of(plan: RefitPlan, buffers: Tensor, index: int) -> Tensor:
    """Return the memory of bucket `index`, uint8 [bucket.nbytes]; buckets use `new_buffers` round-robin."""
    return buffers[index % len(buffers), : plan.buckets[index].nbytes]


class CopyList:
    """Repeatable copies between tensors. On a GPU, a few kernels make all small contiguous copies; a strided tensor
    among them would make torch copy them one by one."""

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
    """Return whether two tensors of one dtype and shape are bitwise identical."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """Return the slot's bytes as a tensor of its dtype and shape."""
    return buffer[slot.offset : slot.offset + slot.nbytes].view(getattr(torch, slot.dtype)).view(slot.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
