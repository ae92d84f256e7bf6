"""What every transport has: an `Offer` from the producer to its consumers, a `Sender` and a `Receiver`.

There are three: direct.py (consumers copy the producer's parameters), shared.py (a buffer that both sides have open)
and broadcast.py (a collective). Consumers get the producer's offer, pickled; both sides join a process group; then the
producer sends and consumers receive at each refit.

A checksum of a buffer's bytes that is cheap on any device and changes when bytes change or move.

Which transport a producer takes.

What both sides of a refit report, and the checks that compare the two.
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

_WORDS = 1 << 20

_ODD = -7046029254386353131  # 2^64 divided by the golden ratio

Verify = Literal["off", "sample", "full"]

# One chunk in this many is verified, the first one included; 0 for none.
_EVERY: dict[Verify, int] = {"off": 0, "sample": 16, "full": 1}


def looked_at[Item](verify: Verify, items: Sequence[Item]) -> Sequence[Item]:
    """The items that are verified."""
    return items[:: _EVERY[verify]] if _EVERY[verify] else []


class Checksums:
    """Checksums of several buffers, computed on the buffers' device and read from it together, by `values`."""

    def __init__(self, verify: Verify):
        self._every = _EVERY[verify]
        self._sums: list[Tensor] = []

    def add(self, buffer: Tensor) -> None:
        """Add the checksum of a contiguous uint8 tensor whose length is a multiple of 8. Work that the device's current
        stream gets later may change the buffer.

        Raises:
            ValueError: another dtype, layout or length.
        """
        if self._every:
            self._sums.append(_sum(buffer, self._every))

    def values(self) -> list[int]:
        """One number for each buffer, in order; empty if nothing is verified."""
        return [number & (2**64 - 1) for number in torch.stack(self._sums).tolist()] if self._sums else []


def _sum(buffer: Tensor, every: int) -> Tensor:
    """The checksum of one chunk in `every`, a scalar on the buffer's device.

    It is the sum modulo 2^64 of the 64-bit words, each mixed with its position by invertible steps. A single changed
    word always changes the sum; words that change, or trade places, together leave it equal with probability 2^-64. It
    is not cryptographic.
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
        mixed = (chunk ^ _shifted(chunk, 31)) * (position * _ODD | 1)
        total += ((mixed ^ _shifted(mixed, 29)) * _ODD).sum()
    return total


def _shifted(words: Tensor, bits: int) -> Tensor:
    """`words` as unsigned numbers, shifted right: torch's own shift copies the sign, after which a word and its
    complement would mix to the same number."""
    return (words >> bits) & ((1 << 64 - bits) - 1)


Kind = Literal["direct", "shared", "broadcast"]


@dataclass(frozen=True)
class TransportFacts:
    """What the choice depends on, the same on all ranks of the policy. The last two are known once the ranks have
    looked, which they do only where the choice would be `direct` if both were true."""

    shares_device: bool
    """Whether each engine rank is on the device of its policy rank."""
    on_gpu: bool
    direct: bool
    """The key `refit.direct`."""
    has_recipe: bool
    """Whether the export is known to only move elements."""
    one_machine: bool = True
    """Whether the ranks that need each other's parameters are on one machine."""
    memory_opens: bool = True
    """Whether these ranks can open one another's memory."""


def choose_transport(facts: TransportFacts) -> Kind:
    """`direct` if engines can copy parameters, else `shared` on a shared device, else `broadcast`."""
    if not facts.shares_device:
        return "broadcast"
    can_copy = facts.on_gpu and facts.has_recipe and facts.one_machine and facts.memory_opens
    return "direct" if facts.direct and can_copy else "shared"


# Largest mean difference, in nats, between the logprobs that two implementations of one model give a probe's tokens, by
# policy.precision: in bfloat16 the two round differently, and short probes of correct runs have differed by up to 0.08.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}

# The same for engines that compute with 8-bit weights and inputs, whose rounding alone exceeds the limit of bfloat16 in
# a small random model (tests/functional/test_eight_bits.py).
PROBE_TOLERANCE_QUANTIZED = 0.8


@dataclass
class RefitReport:
    """What one side did: seconds by stage, and the checksum of each bucket if checksums were asked for."""

    seconds: dict[str, float] = field(default_factory=dict)
    checksums: list[int] = field(default_factory=list)

    def add(self, stage: str, started: float) -> float:
        """Add the time since `started` to a stage; returns the time now."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - started
        return now


def compare_checksums(plan: RefitPlan, sent: RefitReport, received: RefitReport, consumer: str) -> None:
    """Raises RefitError naming `consumer` and the bucket whose bytes differ from the producer's."""
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
            RefitError: a consumer that was not done in time, or tensors that are not the plan's.
        """
        ...


class Export(Protocol):
    """The source of a sender's buckets. In each refit the sender calls `start`, then `begin` and `fill` for each bucket
    in turn, and `finish` if it gives up.

    `begin` and `fill` add their seconds to `report`: `iterate` for waiting, `pack` for copies.
    """

    def start(self) -> None:
        """Start a refit."""

    def begin(self, index: int, report: RefitReport) -> None:
        """Do what can be done for bucket `index` before there is memory for it."""

    def fill(self, index: int, buffer: Tensor, report: RefitReport) -> None:
        """Put the bucket's tensors into `buffer`, uint8 [bucket.nbytes]."""

    def finish(self, buffer_of: Callable[[int], Tensor | None]) -> None:
        """Do the rest of the collectives of this refit, in which other ranks still are. `buffer_of`: memory for a
        bucket, None on a rank that wants no weights."""


class Loader(Protocol):
    """What brings received weights to their places."""

    def fill(self, arrived: ReceivedBucket) -> None:
        """Take a bucket's tensors, whose memory the next bucket overwrites."""
        ...

    def windows(self) -> list[Window] | None:
        """After a first refit: every window of a tensor that is copied somewhere; None if the loader does more than
        copy."""
        return None

    def forget_buffers(self) -> None:
        """Keep no views of buckets' memory, so that it can be freed."""
        return


class Receiver(Protocol):
    """The consumer's side of a joined group."""

    def receive(self, loader: Loader) -> RefitReport:
        """Bring all weights to `loader`. Time is reported as `transfer`, which excludes the loader's.

        Raises:
            RefitError: another plan than the producer's, or weights that did not arrive in time or intact.
        """
        ...


class WeightSource(Protocol):
    """How consumers get the weights of one producer. It is pickled."""

    def group_device(self, device: torch.device) -> torch.device:
        """The device of the process group, for weights on `device`."""
        ...

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> Receiver:
        """The consumer's side, for an engine whose weights are on `device`."""
        ...


@dataclass(frozen=True)
class Transport:
    """The producer's side before consumers have joined."""

    offer: Callable[[], WeightSource]
    """Makes an offer for one connection."""
    sender: Callable[[RefitGroup], Sender]
    """Makes the sender of a joined group."""


class NoConsumers:
    """The `Sender` of a policy rank without consumers, which participates in the `export` of other ranks."""

    def __init__(self, export: Export | None):
        """`export`: None if no other rank needs this one."""
        self._export = export

    def send(self) -> None:
        if self._export is not None:
            self._export.start()
            self._export.finish(lambda index: None)


def synchronize(tensor: Tensor) -> None:
    """Wait until the tensor's device has done what it was asked for; another process does not see our streams."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
