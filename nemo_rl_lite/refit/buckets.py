"""Bucket transports: a broadcast, and a buffer that processes on one device share.

An `Export` fills buckets: `BucketReshard` copies and exchanges parts of parameters, `Stream` takes tensors one by one.
While bucket k is in flight, the producer fills bucket k + 1 and consumers load bucket k - 1. Each side waits only for
transfers of the buffer that it needs. On a GPU, the current stream orders loading and the next transfer.
"""

import math
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.compat.torch import open_cuda_tensor, share_cuda_tensor
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.group import PendingTransfer, RefitGroup, all_gather, group_by_need
from nemo_rl_lite.refit.interface import Checksums, Export, Loader, RefitReport, Transport, Verify, synchronize
from nemo_rl_lite.refit.layout import (
    Bucket,
    CopyList,
    Named,
    ReceivedBucket,
    RefitPlan,
    buffer_of,
    dtype_name,
    new_buffers,
    view,
)
from nemo_rl_lite.refit.trace import Recipe, plan_exchange, source_ranks


def assemble(
    plan: RefitPlan,
    parameters: Mapping[int, Tensor],
    recipe: Recipe | None,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup],
    timeout_s: float,
) -> "BucketReshard | None":
    """Return this rank's `BucketReshard`, or None if no rank needs this one. Collective over the default group.

    `recipe`: None without consumers. `groups`: existing process groups to reuse.
    """
    rank = dist.get_rank()
    ranks, group = group_by_need(None if recipe is None else source_ranks(recipe), groups, timeout_s)
    if not ranks:
        return None
    wanted = dict(all_gather((rank, recipe), group)) if group is not None else {rank: recipe}
    recipes = {one: recipe for one, recipe in wanted.items() if recipe is not None}
    return BucketReshard(plan, parameters, recipes, rank, group, device)


class BucketReshard:
    """`Export` of parameters that are sharded over ranks.

    Each rank packs windows for other ranks into its section of an arena. The ranks exchange sections, and those with
    consumers copy windows from the arena into the bucket. If one rank has a bucket's parameters (pipeline stages), it
    fills the bucket and broadcasts it. All ranks process all buckets in order, with the buffer None on ranks without
    consumers.
    """

    def __init__(
        self,
        plan: RefitPlan,
        parameters: Mapping[int, Tensor],
        recipes: Mapping[int, Recipe],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        """`parameters`: this rank's, contiguous, by number in the recipes. `recipes`: of ranks with consumers, by
        global rank. `group`: None for a single rank."""
        self._plan, self._parameters, self._group = plan, parameters, group
        self._ranks = [rank] if group is None else dist.get_process_group_ranks(group)
        # Gloo's all-gather is several times slower than a broadcast from each rank.
        gather = device.type == "cuda"
        self._exchanges = [plan_exchange(bucket, recipes, self._ranks, rank, gather) for bucket in plan.buckets]
        self._rank = rank
        # A rank without consumers still takes part in broadcasts.
        broadcast = 0 if rank in recipes else max(bucket.nbytes for bucket in plan.buckets)
        arena_bytes = max([broadcast, *(exchange.nbytes for exchange in self._exchanges)])
        self._arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        self._own: dict[int, CopyList] = {}
        self._into: dict[int, tuple[int, CopyList, CopyList]] = {}
        self._pending = list[Any]()
        # Progress of this refit, in buckets.
        self._begun = self._filled = 0
        self._release()

    @property
    def collectives(self) -> int:
        """Return the number of collectives per refit."""
        return sum(exchange.collectives for exchange in self._exchanges)

    def start(self) -> None:
        self._begun = self._filled = 0
        if not self._arena.untyped_storage().nbytes():
            self._arena.untyped_storage().resize_(self._arena.numel())

    def begin(self, index: int, report: RefitReport) -> None:
        """Pack windows for other ranks, and start their exchange."""
        clock, exchange = time.perf_counter(), self._exchanges[index]
        self._begun = index + 1
        if index not in self._own:
            sources = [packed.source.of(self._parameters[packed.parameter]) for packed, _ in exchange.own]
            targets = [self._in_arena(begin, source) for source, (_, begin) in zip(sources, exchange.own, strict=True)]
            self._own[index] = CopyList(targets, sources)
        self._own[index].run()
        if exchange.gathered:
            begin, size = exchange.sections[self._rank]
            together, own = self._arena[: size * len(self._ranks)], self._arena[begin : begin + size]
            self._pending = [dist.all_gather_into_tensor(together, own, group=self._group, async_op=True)]
        elif exchange.whole is None:
            sections = exchange.sections.items()
            self._pending = [self._broadcast(self._arena[at : at + size], source) for source, (at, size) in sections]
        report.add("pack", clock)

    def fill(self, index: int, buffer: Tensor | None, report: RefitReport) -> None:
        clock, exchange = time.perf_counter(), self._exchanges[index]
        if buffer is None:
            buffer = self._arena[: self._plan.buckets[index].nbytes if exchange.whole is not None else 0]
        here, arriving = self._filling(index, buffer)
        here.run()
        if exchange.whole is not None:
            self._pending = [self._broadcast(buffer, exchange.whole)]
        clock = report.add("pack", clock)
        for work in self._pending:
            # On a GPU, this blocks the current stream, not the host.
            work.wait()
        self._pending = []
        clock = report.add("iterate", clock)
        arriving.run()
        self._filled = index + 1
        if self._filled == len(self._exchanges):
            self._release()
        report.add("pack", clock)

    def finish(self, buffer_of: Callable[[int], Tensor | None]) -> None:
        report = RefitReport()
        for index in range(self._filled, len(self._exchanges)):
            if self._begun == index:
                self.begin(index, report)
            self.fill(index, buffer_of(index), report)

    def _filling(self, index: int, buffer: Tensor) -> tuple[CopyList, CopyList]:
        """Return copies into the buffer from this rank's parameters and from the arena. They are cached, because a
        bucket mostly uses the same memory."""
        kept = self._into.get(index)
        if kept is None or kept[0] != buffer.data_ptr():
            exchange = self._exchanges[index]
            slots = {slot: view(buffer, slot) for slot in {slot for slot, *_ in (*exchange.here, *exchange.arriving)}}
            here = CopyList(
                [segment.target.of(slots[slot]) for slot, segment in exchange.here],
                [segment.source.of(self._parameters[segment.parameter]) for _, segment in exchange.here],
            )
            targets = [segment.target.of(slots[slot]) for slot, segment, _ in exchange.arriving]
            begins = [begin for *_, begin in exchange.arriving]
            arrived = [self._in_arena(begin, target) for begin, target in zip(begins, targets, strict=True)]
            kept = self._into[index] = buffer.data_ptr(), here, CopyList(targets, arrived)
        return kept[1], kept[2]

    def _in_arena(self, begin: int, like: Tensor) -> Tensor:
        """Return contiguous memory of the arena with the shape and dtype of `like`."""
        memory = self._arena[begin : begin + math.prod(like.shape) * like.element_size()]
        return memory.view(like.dtype).view(like.shape)

    def _broadcast(self, memory: Tensor, source: int) -> Any:
        return dist.broadcast(memory, src=source, group=self._group, async_op=True)

    def _release(self) -> None:
        """Free GPU memory between refits; its views stay valid for the next refit."""
        if self._arena.is_cuda:
            self._arena.untyped_storage().resize_(0)


@dataclass(frozen=True)
class BucketChannel:
    """Transfers the plan's buckets from producer to consumers, in order.

    Buckets use `memory` (of `new_buffers`) round-robin. Each side finishes a bucket before it reuses its buffer. If
    `is_shared`, both sides have the same memory, and a barrier per bucket means that the bucket is complete and the
    previous one loaded.
    """

    plan: RefitPlan
    groups: Sequence[RefitGroup]
    """The group of each bucket. A rank can have different ranks in each, but all follow one order of all buckets."""
    memory: Tensor
    is_shared: bool

    @classmethod
    def of_one_group(cls, plan: RefitPlan, group: RefitGroup, memory: Tensor, is_shared: bool) -> "BucketChannel":
        """Return the channel of a producer and consumers of all buckets."""
        return cls(plan, [group] * len(plan.buckets), memory, is_shared)

    def announce(self) -> None:
        """Send each group the hash of its buckets' plan."""
        for group, plan in self._plans.items():
            group.announce(plan.digest)

    def expect(self) -> None:
        """Receive each group's hash. Raises RefitError: it is of another plan."""
        for group, plan in self._plans.items():
            group.expect(plan.digest)

    @cached_property
    def _plans(self) -> dict[RefitGroup, RefitPlan]:
        buckets: dict[RefitGroup, list[Bucket]] = defaultdict(list)
        for group, bucket in zip(self.groups, self.plan.buckets, strict=True):
            buckets[group].append(bucket)
        return {group: RefitPlan(tuple(own)) for group, own in buckets.items()}

    @property
    def ahead(self) -> int:
        """Return the maximum number of buckets in flight."""
        return 1 if self.is_shared else len(self.memory)

    def buffer(self, index: int) -> Tensor:
        """Return the memory of bucket `index`, uint8 [bucket.nbytes]."""
        return buffer_of(self.plan, self.memory, index)

    def start(self, index: int) -> PendingTransfer:
        """Start the transfer of bucket `index`."""
        buffer, bucket, group = self.buffer(index), self.plan.buckets[index], self.groups[index]
        if not self.is_shared:
            return group.start(buffer, f"{bucket.describe()}, {bucket.nbytes} bytes")
        synchronize(buffer)
        return group.start_barrier(bucket.describe())

    def end(self) -> None:
        """End the refit."""
        if self.is_shared:
            synchronize(self.memory)
            self.groups[-1].barrier("the end of the refit")


class BucketSender:
    """`Sender` that fills buffers from an `Export` and transfers them in order.

    Stages, in addition to the export's: `pack` (checksums) and `transfer` (waiting for consumers).
    """

    def __init__(self, channel: BucketChannel, verify: Verify, export: Export):
        self._channel, self._verify, self._export = channel, verify, export

    def send(self) -> RefitReport:
        self._export.start()
        try:
            return self._send()
        except RefitError:
            # Other ranks wait in this refit's collectives.
            self._export.finish(self._channel.buffer)
            raise

    def _send(self) -> RefitReport:
        report, checksums, transfers = RefitReport(), Checksums(self._verify), list[PendingTransfer]()
        channel = self._channel
        channel.announce()
        for index in range(len(channel.plan.buckets)):
            self._export.begin(index, report)
            clock = time.perf_counter()
            if index >= channel.ahead:
                transfers[index - channel.ahead].finish()
            report.add("transfer", clock)
            self._export.fill(index, channel.buffer(index), report)
            clock = time.perf_counter()
            checksums.add(channel.buffer(index))
            transfers.append(channel.start(index))
            report.add("pack", clock)
        clock = time.perf_counter()
        for transfer in transfers:
            transfer.finish()
        channel.end()
        report.add("transfer", clock)
        report.checksums = checksums.values()
        return report


class BucketReceiver:
    """`Receiver` that passes buckets to the loader in order."""

    def __init__(self, channel: BucketChannel, verify: Verify):
        self._channel, self._verify = channel, verify

    def receive(self, loader: Loader) -> RefitReport:
        report, checksums, channel = RefitReport(), Checksums(self._verify), self._channel
        buckets = channel.plan.buckets
        channel.expect()
        transfers = [channel.start(index) for index in range(min(channel.ahead, len(buckets)))]
        for index, bucket in enumerate(buckets):
            clock = time.perf_counter()
            transfers[index].finish()
            report.add("transfer", clock)
            checksums.add(channel.buffer(index))
            loader.fill(ReceivedBucket(index, bucket, channel.buffer(index)))
            if len(transfers) < len(buckets):
                transfers.append(channel.start(len(transfers)))
        channel.end()
        report.checksums, report.nbytes = checksums.values(), channel.plan.nbytes
        return report


class Stream:
    """`Export` of the tensors (any device and layout) that `tensors()` yields at each refit, in the plan's order."""

    def __init__(self, plan: RefitPlan, tensors: Callable[[], Iterable[Named]], gathers: bool = False):
        """`gathers`: yielding a tensor is a collective of several ranks."""
        self._plan, self._make, self._gathers = plan, tensors, gathers
        self._tensors: Iterator[Named] = iter(())
        self._named: list[Named] = []

    def start(self) -> None:
        self._tensors = iter(self._make())

    def begin(self, index: int, report: RefitReport) -> None:
        """See `Export.begin`. Raises RefitError: there are fewer or more tensors than in the plan."""
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
        """See `Export.fill`. Raises RefitError: the tensors differ from the plan."""
        clock = time.perf_counter()
        targets = []
        for slot, (name, tensor) in zip(self._plan.buckets[index].slots, self._named, strict=True):
            if (name, tuple(tensor.shape), dtype_name(tensor.dtype)) != (slot.name, slot.shape, slot.dtype):
                planned = f"{slot.name} {list(slot.shape)} {slot.dtype}"
                given = f"{name} {list(tensor.shape)} {dtype_name(tensor.dtype)}"
                raise RefitError(f"the plan expects {planned}, the model gave {given}")
            targets.append(view(buffer, slot))
        CopyList(targets, [tensor for _, tensor in self._named]).run()
        self._named = []
        report.add("pack", clock)

    def finish(self, buffer_of: Callable[[int], Tensor | None]) -> None:
        if self._gathers:
            for _ in self._tensors:
                pass


class BroadcastBuffers:
    """Producer's buffers for at most `count` buckets in flight."""

    is_shared = False

    def __init__(self, plan: RefitPlan, count: int, device: torch.device):
        self.memory = new_buffers(plan, count, device)

    def offer(self) -> "BroadcastOffer":
        return BroadcastOffer(len(self.memory))


@dataclass(frozen=True)
class BroadcastOffer:
    """`WeightSource` of a broadcast with `count` buckets in flight."""

    count: int

    def group_device(self, device: torch.device) -> torch.device:
        return device

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> BucketReceiver:
        memory = new_buffers(plan, self.count, device)
        return BucketReceiver(BucketChannel.of_one_group(plan, group, memory, is_shared=False), verify)


@dataclass(frozen=True)
class SharedOffer:
    """`WeightSource` of a shared buffer, uint8 [halves, half_bytes]: its CUDA IPC handle, or the path of an in-memory
    file. The file lives as long as the producer."""

    cuda: tuple[Any, ...] | None
    file: str | None
    halves: int
    half_bytes: int

    def open(self) -> Tensor:
        if self.cuda is not None:
            return open_cuda_tensor(self.cuda)
        if self.file is None:
            raise ValueError("a shared buffer needs a CUDA handle or a file")
        size = self.halves * self.half_bytes
        return torch.from_file(self.file, shared=True, size=size, dtype=torch.uint8).view(self.halves, -1)

    def group_device(self, device: torch.device) -> torch.device:
        # The group sends only small messages.
        return torch.device("cpu")

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> BucketReceiver:
        return BucketReceiver(BucketChannel.of_one_group(plan, group, self.open(), is_shared=True), verify)


class SharedBuffer:
    """Producer's buffer with two halves, each for the plan's largest bucket: consumers load one while the producer
    fills the other."""

    is_shared = True

    def __init__(self, plan: RefitPlan, device: torch.device):
        """Raises RefitError: free host memory is too small."""
        self._file: str | None = None
        halves, half_bytes = min(2, len(plan.buckets)), max(bucket.nbytes for bucket in plan.buckets)
        if device.type == "cuda":
            self.memory = new_buffers(plan, halves, device)
            return
        size, free = halves * half_bytes, psutil.virtual_memory().available
        if size > free:
            raise RefitError(
                f"the refit's buffer needs {size} bytes of host memory, but {free} are free; see refit.bucket_bytes"
            )
        # Containers limit the size of /dev/shm, but not of in-memory files.
        file = os.memfd_create("nemo_rl_lite-refit")
        weakref.finalize(self, os.close, file)
        os.truncate(file, size)
        self._file = f"/proc/{os.getpid()}/fd/{file}"
        self.memory = SharedOffer(None, self._file, halves, half_bytes).open()

    def offer(self) -> SharedOffer:
        """Return the source of one connection, with a new CUDA handle."""
        cuda = share_cuda_tensor(self.memory) if self._file is None else None
        return SharedOffer(cuda, self._file, *self.memory.shape)


BucketBuffers = BroadcastBuffers | SharedBuffer
"""Producer's buffers, kept between connections."""


def bucket_transport(plan: RefitPlan, buffers: BucketBuffers, verify: Verify, export: Export) -> Transport:
    def sender(group: RefitGroup) -> BucketSender:
        channel = BucketChannel.of_one_group(plan, group, buffers.memory, buffers.is_shared)
        return BucketSender(channel, verify, export)

    return Transport(buffers.offer, sender)
