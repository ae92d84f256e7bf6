"""Interfaces of refits (weight sync), and checksums.

Four transports implement them. Consumers copy the producer's parameters (ipc.py), or receive buckets through a shared
buffer or a broadcast (buckets.py). Or they receive only the windows that they need (windows.py). Consumers get the
producer's pickled `WeightSource`. Both sides join a process group; at each refit the producer sends and consumers
receive.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.group import RefitGroup
from nemo_rl_lite.refit.layout import ReceivedBucket, RefitPlan
from nemo_rl_lite.refit.trace import StridedView

Verify = Literal["off", "sample", "full"]
# Verify every n-th chunk, from the first; 0 for none.
_EVERY: dict[Verify, int] = {"off": 0, "sample": 16, "full": 1}
# Words per chunk.
_WORDS = 1 << 20
# 2^64 divided by the golden ratio.
_ODD = -7046029254386353131


def sampled[Item](verify: Verify, items: Sequence[Item]) -> Sequence[Item]:
    """Return the items to verify."""
    return items[:: _EVERY[verify]] if _EVERY[verify] else []


class Checksums:
    """Checksums of buffers, computed on the buffers' device."""

    def __init__(self, verify: Verify):
        self._every = _EVERY[verify]
        self._sums: list[Tensor] = []

    def add(self, buffer: Tensor) -> None:
        """Add the checksum of a contiguous uint8 tensor of 8n bytes; otherwise raises ValueError. Later work of the
        current stream may change the buffer."""
        if self._every:
            self._sums.append(_sum(buffer, self._every))

    def values(self) -> list[int]:
        """Return one number per buffer, in order; empty if nothing is verified. Synchronizes."""
        return [number & (2**64 - 1) for number in torch.stack(self._sums).tolist()] if self._sums else []


def _sum(buffer: Tensor, every: int) -> Tensor:
    """Return the checksum of each `every`-th chunk, a scalar on the buffer's device.

    It is the sum modulo 2^64 of 64-bit words, each mixed with its position by invertible steps. It detects one changed
    word always, several changed or exchanged words with probability 1 - 2^-64. It is not cryptographic.
    """
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.numel() % 8:
        raise ValueError(f"a contiguous uint8 tensor of 8n bytes is needed, got {buffer.dtype}, {buffer.numel()} bytes")
    words = buffer.view(-1).view(torch.int64)
    if buffer.is_cuda:
        from nemo_rl_lite.refit.checksum_kernel import sum_words

        return sum_words(words, every, _WORDS, _ODD)
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, words.numel(), every * _WORDS):
        chunk = words[start : start + _WORDS]
        position = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=buffer.device)
        # The masks make shifts logical; otherwise a word and its complement would mix to the same number.
        mixed = (chunk ^ ((chunk >> 31) & 0x1FFFFFFFF)) * (position * _ODD | 1)
        total += ((mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * _ODD).sum()
    return total


# Largest mean difference of a probe's logprobs between two implementations of a model, in nats, by policy.precision.
# bfloat16 implementations round differently: up to 0.08 in correct runs.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
# The same with 8-bit weights, inputs or KV caches on a side, which round more (tests/functional/test_eight_bits.py).
PROBE_TOLERANCE_QUANTIZED = 0.8


@dataclass
class RefitReport:
    """One side's seconds by stage, checksums of buckets, if enabled, and the bytes that a receiver has received."""

    seconds: dict[str, float] = field(default_factory=dict)
    checksums: list[int] = field(default_factory=list)
    nbytes: int = 0

    def add(self, stage: str, started: float) -> float:
        """Add the time since `started` to a stage. Returns the current time."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - started
        return now


def compare_checksums(plan: RefitPlan, sent: RefitReport, received: RefitReport, consumer: str) -> None:
    """Compare received with sent checksums. Raises RefitError, which names `consumer` and the bucket."""
    if len(received.checksums) != len(sent.checksums):
        raise RefitError(f"{consumer} received {len(received.checksums)} of {len(sent.checksums)} buckets")
    for index, (theirs, ours) in enumerate(zip(received.checksums, sent.checksums, strict=True)):
        if theirs != ours:
            where = f"bucket {index} ({plan.buckets[index].describe()})"
            raise RefitError(f"{consumer} received different bytes in {where}")


Window = tuple[str, int, StridedView, Tensor]
"""Tensor name, its number of elements, a window of it, and the contiguous memory that receives the window."""


class Sender(Protocol):
    """Producer of a joined group."""

    def send(self) -> RefitReport | None:
        """Send the current weights to all consumers; returns None without consumers. Collective over ranks that share
        a model. Raises RefitError: a consumer exceeded the timeout, or tensors differ from the plan."""


class Export(Protocol):
    """Fills a sender's buckets.

    In each refit the sender calls `start`, then `begin` and `fill` for each bucket in order, and `finish` if it fails.
    `begin` and `fill` add seconds to `report`: `iterate` for waiting, `pack` for copies.
    """

    def start(self) -> None:
        """Start a refit."""

    def begin(self, index: int, report: RefitReport) -> None:
        """Do the work for bucket `index` that needs no buffer."""

    def fill(self, index: int, buffer: Tensor, report: RefitReport) -> None:
        """Write the bucket's tensors to `buffer`, uint8 [bucket.nbytes]."""

    def finish(self, buffer_of: Callable[[int], Tensor | None]) -> None:
        """Complete this refit's collectives for the other ranks. `buffer_of`: a bucket's memory; None without
        consumers."""


class Loader(Protocol):
    """Loads received weights into an engine."""

    def fill(self, arrived: ReceivedBucket) -> None:
        """Load a bucket's tensors, whose memory the next bucket overwrites."""

    def windows(self) -> list[Window] | None:
        """Return, after a first refit, all windows that are copied; None if the loader does more than copy."""
        return None

    def forget_buffers(self) -> None:
        """Drop all views of buckets' memory, so that it can be freed."""
        return


class Receiver(Protocol):
    """Consumer of a joined group."""

    def receive(self, loader: Loader) -> RefitReport:
        """Receive all weights into `loader`, whose time is not part of the report's `transfer`. Raises RefitError: the
        producer has another plan, or weights did not arrive in time or intact."""


class WeightSource(Protocol):
    """Source of one producer's weights; pickled and sent to consumers."""

    def group_device(self, device: torch.device) -> torch.device:
        """Return the process group's device, for weights on `device`."""

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> Receiver:
        """Return the receiver of an engine with weights on `device`."""


@dataclass(frozen=True)
class Transport:
    """Producer before consumers have joined."""

    offer: Callable[[], WeightSource]
    """Creates the source of one connection."""
    sender: Callable[[RefitGroup], Sender]
    """Creates the sender of a joined group."""


class NoConsumers:
    """`Sender` of a rank without consumers; takes part in the `export` of other ranks, if any."""

    def __init__(self, export: Export | None):
        self._export = export

    def send(self) -> None:
        if self._export is not None:
            self._export.start()
            self._export.finish(lambda index: None)


def synchronize(tensor: Tensor) -> None:
    """Wait for the current stream of the tensor's device, because streams do not order other processes."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
