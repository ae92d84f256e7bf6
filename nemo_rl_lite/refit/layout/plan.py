"""The bucket plan of a refit: which tensor lies where in which bucket. Pure Python.

The producer makes the plan once. Every consumer gets a copy and compares its hash with the one on the wire before the
first weight, so the two sides cannot disagree on sizes.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property

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
    """Where one tensor lies in its bucket; `offset` and `nbytes` are in bytes."""

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
        """SHA-256 of everything the two sides must agree on: 32 bytes."""
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
        ValueError: an empty list, a name twice, an unknown dtype, a bucket size below 1.
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
    """`nbytes` rounded up to a multiple of 512."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def bucket_size(memory_bytes: int, ratio: float, explicit: int | None) -> int:
    """Bytes of a bucket: `explicit` if given, else `ratio` of the memory, at most 5 GiB."""
    return explicit if explicit is not None else max(1, min(int(memory_bytes * ratio), 5 * 2**30))
