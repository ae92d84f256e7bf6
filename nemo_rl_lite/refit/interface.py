"""The interface of refits: weight sources, senders, receivers, exports and loaders, and the checks of both sides.

Three transports implement it: consumers copy the producer's parameters (ipc.py), or get buckets through a shared
buffer or a broadcast (buckets.py). Consumers get the producer's `WeightSource`, pickled. Both sides join a process
group, and at each refit the producer sends and consumers receive.
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
# Verify one chunk in this many, the first one included; 0 for none.
_EVERY: dict[Verify, int] = {"off": 0, "sample": 16, "full": 1}
# Words of a chunk.
_WORDS = 1 << 20
# 2^64 divided by the golden ratio.
_ODD = -7046029254386353131


def sampled[Item](verify: Verify, items: Sequence[Item]) -> Sequence[Item]:
    """Return the items to verify."""
    return items[:: _EVERY[verify]] if _EVERY[verify] else []


class Checksums:
    """Checksums of buffers, computed on the buffers' device and read together by `values`."""

    def __init__(self, verify: Verify):
        self._every = _EVERY[verify]
        self._sums: list[Tensor] = []

    def add(self, buffer: Tensor) -> None:
        """Add the checksum of a contiguous uint8 tensor of 8n bytes. Later work of the current stream may change the
        buffer.

        Raises:
            ValueError: another dtype, layout or length.
        """
        if self._every:
            self._sums.append(_sum(buffer, self._every))

    def values(self) -> list[int]:
        """Return one number for each buffer, in order; empty if nothing is verified."""
        return [number & (2**64 - 1) for number in torch.stack(self._sums).tolist()] if self._sums else []


def _sum(buffer: Tensor, every: int) -> Tensor:
    """Return the checksum of one chunk in `every`, a scalar on the buffer's device.

    It is the sum modulo 2^64 of the 64-bit words, each mixed with its position by invertible steps. A single changed
    word always changes the sum. Several changed or exchanged words leave it equal with probability 2^-64. It is not
    cryptographic.
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
        # The masks make the shifts logical: without them a word and its complement mix to the same number.
        mixed = (chunk ^ ((chunk >> 31) & 0x1FFFFFFFF)) * (position * _ODD | 1)
        total += ((mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * _ODD).sum()
    return total


# Largest mean difference of logprobs, in nats, between two implementations of one model on a probe, by
# policy.precision. In bfloat16 they round differently: short probes of correct runs have differed by up to 0.08.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
# The same for engines with 8-bit weights and inputs, whose rounding alone exceeds the limit of bfloat16 in a small
# random model (tests/functional/test_eight_bits.py).
PROBE_TOLERANCE_QUANTIZED = 0.8


@dataclass
class RefitReport:
    """One side's seconds by stage, and the checksum of each bucket if checksums were asked for."""

    seconds: dict[str, float] = field(default_factory=dict)
    checksums: list[int] = field(default_factory=list)

    def add(self, stage: str, started: float) -> float:
        """Add the time since `started` to a stage; return the time now."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - started
        return now


def compare_checksums(plan: RefitPlan, sent: RefitReport, received: RefitReport, consumer: str) -> None:
    """Compare the bytes received with those sent.

    Raises:
        RefitError: naming `consumer` and the bucket that differs.
    """
    if len(received.checksums) != len(sent.checksums):
        raise RefitError(f"{consumer} received {len(received.checksums)} of {len(sent.checksums)} buckets")
    for index, (theirs, ours) in enumerate(zip(received.checksums, sent.checksums, strict=True)):
        if theirs != ours:
            where = f"bucket {index} ({plan.buckets[index].describe()})"
            raise RefitError(f"{consumer} received other bytes than were sent in {where}")


Window = tuple[str, int, StridedView, Tensor]
"""A tensor's name and number of elements, a window of it, and the contiguous memory that the window is copied to."""


class Sender(Protocol):
    """The producer's side of a joined group."""

    def send(self) -> RefitReport | None:
        """Bring the current weights to all consumers; None if there are none. Ranks that share a model call it
        together.

        Raises:
            RefitError: a consumer was not done in time, or tensors are not the plan's.
        """
        ...


class Export(Protocol):
    """Fills a sender's buckets. In each refit the sender calls `start`, then `begin` and `fill` for each bucket in
    order, and `finish` if it gives up. `begin` and `fill` add their seconds to `report`: `iterate` for waiting,
    `pack` for copies."""

    def start(self) -> None:
        """Start a refit."""

    def begin(self, index: int, report: RefitReport) -> None:
        """Do what needs no memory for bucket `index`."""

    def fill(self, index: int, buffer: Tensor, report: RefitReport) -> None:
        """Put the bucket's tensors into `buffer`, uint8 [bucket.nbytes]."""

    def finish(self, buffer_of: Callable[[int], Tensor | None]) -> None:
        """Do the rest of this refit's collectives, in which other ranks still are. `buffer_of`: memory for a bucket,
        None on a rank that wants no weights."""


class Loader(Protocol):
    """Brings received weights to their places."""

    def fill(self, arrived: ReceivedBucket) -> None:
        """Take a bucket's tensors, whose memory the next bucket overwrites."""
        ...

    def windows(self) -> list[Window] | None:
        """Return, after a first refit, every window of a tensor that is copied somewhere; None if the loader does
        more than copy."""
        return None

    def forget_buffers(self) -> None:
        """Drop all views of buckets' memory, so that it can be freed."""
        return


class Receiver(Protocol):
    """The consumer's side of a joined group."""

    def receive(self, loader: Loader) -> RefitReport:
        """Bring all weights to `loader`. The report's `transfer` excludes the loader's time.

        Raises:
            RefitError: the producer has another plan, or weights did not arrive in time or intact.
        """
        ...


class WeightSource(Protocol):
    """Gives consumers the weights of one producer. It is pickled."""

    def group_device(self, device: torch.device) -> torch.device:
        """Return the device of the process group, for weights on `device`."""
        ...

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> Receiver:
        """Return the consumer's side, for an engine whose weights are on `device`."""
        ...


@dataclass(frozen=True)
class Transport:
    """The producer's side before consumers have joined."""

    offer: Callable[[], WeightSource]
    """Makes the source of one connection."""
    sender: Callable[[RefitGroup], Sender]
    """Makes the sender of a joined group."""


class NoConsumers:
    """The `Sender` of a rank without consumers: it participates in the `export` of other ranks, if one needs it."""

    def __init__(self, export: Export | None):
        self._export = export

    def send(self) -> None:
        if self._export is not None:
            self._export.start()
            self._export.finish(lambda index: None)


def synchronize(tensor: Tensor) -> None:
    """Wait for the current stream of the tensor's device; other processes do not see our streams."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
