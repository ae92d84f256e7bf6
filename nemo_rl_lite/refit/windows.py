"""Refits window to window: each policy rank sends each engine rank only the windows of parameters that it needs.

After the first refit, an engine's loader knows which windows of which tensors each of its ranks copies. With the traced
export these are windows of parameters: pieces. `route` divides them over the policy ranks that hold them, and groups
them in transfers: buckets of one sender for one set of receivers. A transfer is a broadcast in a group of its sender
and its receivers, so engine replicas share what a policy rank sends.
"""

import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nemo_rl_lite.config.schema import RefitConfig
from nemo_rl_lite.refit.buckets import BucketChannel, BucketReceiver, BucketSender
from nemo_rl_lite.refit.group import RefitGroup, all_gather, client_store, join
from nemo_rl_lite.refit.interface import Loader, NoConsumers, RefitReport, Sender
from nemo_rl_lite.refit.layout import (
    ITEM_BYTES,
    Bucket,
    CopyList,
    ReceivedBucket,
    RefitPlan,
    dtype_name,
    make_plan,
    new_buffers,
    same_bytes,
    view,
)
from nemo_rl_lite.refit.trace import Recipe, StridedView, segments_of_window

log = logging.getLogger(__name__)

Replicas = Mapping[tuple[int, int], Sequence[int]]
"""Sorted ranks that hold the same parameter, by its rank and number in a recipe."""


@dataclass(frozen=True)
class Piece:
    """Window of a parameter, in elements of `dtype`. Pieces with different names can be equal (tied weights)."""

    rank: int
    """The policy rank in the recipe; its replicas have the same bytes."""
    parameter: int
    source: StridedView
    dtype: str
    name: str = field(compare=False)
    """Tensor of which it is a part."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.source.sizes) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Transfer:
    """Bucket with one slot for each piece, broadcast from policy rank `sender` to engine ranks `receivers`."""

    sender: int
    receivers: tuple[int, ...]
    bucket: Bucket
    pieces: tuple[Piece, ...]

    @property
    def stream(self) -> tuple[int, tuple[int, ...]]:
        """Return what transfers of one process group have in common."""
        return self.sender, self.receivers

    @property
    def nbytes(self) -> int:
        """Return the bytes of the pieces, without padding."""
        return _nbytes(self.pieces)

    def shifted(self, ranks: int, engines: int) -> "Transfer":
        """Return the transfer from one engine's to all `engines`, which have `ranks` ranks each."""
        receivers = (engine * ranks + one for engine in range(engines) for one in self.receivers)
        return replace(self, receivers=tuple(receivers))


def find_replicas(recipe: Recipe) -> Replicas:
    """Return the replicas of all parameters in rank 0's recipe; empty on other ranks. Collective.

    A rank's recipe names ranks of one model replica. If it is rank 0's except for the ranks, the ranks that both
    name at one place have the same parameter.
    """
    segments = [segment for own in recipe.values() for segment in own]
    layout = hashlib.sha256(repr([replace(one, rank=0) for one in segments]).encode()).digest()
    given = all_gather((layout, [one.rank for one in segments]))
    same: dict[tuple[int, int], set[int]] = defaultdict(set)
    if torch.distributed.get_rank() == 0:
        for ranks in (ranks for theirs, ranks in given if theirs == layout):
            for segment, rank in zip(segments, ranks, strict=True):
                same[segment.rank, segment.parameter].add(rank)
    return {key: sorted(ranks) for key, ranks in same.items()}


def route(needs: Mapping[int, Iterable[Piece]], replicas: Replicas, bucket_bytes: int) -> list[Transfer]:
    """Divide the pieces that engine ranks need over the policy ranks that hold them, in the order of all ranks' work.

    Each piece has one sender, and one transfer to all its receivers. Replicas send equal shares of at least half a
    bucket. Each serves few sets of receivers, because each pair needs a process group. The order alternates between
    pairs with different senders and receivers, so that all ranks work at once. Ranks that follow it never deadlock.
    """
    receivers: dict[Piece, list[int]] = defaultdict(list)
    for receiver, pieces in needs.items():
        for piece in dict.fromkeys(pieces):
            receivers[piece].append(receiver)
    held: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for piece in receivers:
        held[tuple(replicas[piece.rank, piece.parameter])].append(piece)
    streams: dict[tuple[int, tuple[int, ...]], list[Piece]] = defaultdict(list)
    sent: dict[int, int] = defaultdict(int)
    for holders, pieces in sorted(held.items(), key=lambda one: -_nbytes(one[1])):
        total, done = _nbytes(pieces), 0
        count = min(len(holders), -(-total // bucket_bytes))
        senders = sorted(sorted(holders, key=sent.__getitem__)[:count])
        for piece in sorted(pieces, key=receivers.__getitem__):
            # The sender by the middle of the piece.
            sender = senders[(2 * done + piece.nbytes) * count // (2 * total)]
            streams[sender, tuple(receivers[piece])].append(piece)
            sent[sender] += piece.nbytes
            done += piece.nbytes
    return _ordered([one for stream in streams.items() for one in _transfers(*stream, bucket_bytes)])


def _nbytes(items: Iterable["Piece | Transfer"]) -> int:
    return sum(one.nbytes for one in items)


def _transfers(stream: tuple[int, tuple[int, ...]], pieces: Sequence[Piece], bucket_bytes: int) -> list[Transfer]:
    named = [(f"{one.name} [{number}]", one.source.sizes, one.dtype) for number, one in enumerate(pieces)]
    transfers, begin = list[Transfer](), 0
    for bucket in make_plan(named, bucket_bytes).buckets:
        end = begin + len(bucket.slots)
        transfers.append(Transfer(*stream, bucket, tuple(pieces[begin:end])))
        begin = end
    return transfers


def _ordered(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Return the transfers in rounds, in which each sender has one set of receivers, and each set one sender."""
    senders = sorted({one.sender for one in transfers})
    sets = sorted({one.receivers for one in transfers})
    rounds, seen = max(len(senders), len(sets)), defaultdict[tuple[int, tuple[int, ...]], int](int)

    def place(one: Transfer) -> tuple[int, int, int]:
        sender = senders.index(one.sender)
        seen[one.stream] += 1
        return seen[one.stream], (sets.index(one.receivers) - sender) % rounds, sender

    return sorted(transfers, key=place)


def sent_to(
    receiver: int, transfers: Sequence[Transfer], sent: Sequence[RefitReport | None]
) -> tuple[RefitPlan, RefitReport]:
    """Return the buckets that a receiver gets, and their senders' checksums. `sent`: reports of all policy ranks."""
    sums = [iter(() if report is None else report.checksums) for report in sent]
    all_sent = [(one, next(sums[one.sender], None)) for one in transfers]
    own = [(one.bucket, number) for one, number in all_sent if receiver in one.receivers]
    checksums = [number for _, number in own if number is not None]
    return RefitPlan(tuple(bucket for bucket, _ in own)), RefitReport(checksums=checksums)


Needed = Sequence[tuple[Piece, Tensor]]
"""Pieces that an engine rank copies, and views of its weights in the pieces' shapes."""


def needed_pieces(loader: Loader, recipe: Recipe) -> Needed | None:
    """Return what an engine's `loader` has copied; None if it does more than copy, or copies nothing of a regular
    layout."""
    found = list[tuple[Piece, Tensor]]()
    for name, elements, window, target in loader.windows() or ():
        segments = segments_of_window(recipe[name], elements, window)
        if segments is None:
            return None
        dtype = dtype_name(target.dtype)
        pieces = [Piece(one.rank, one.parameter, one.source, dtype, name) for one in segments]
        found += zip(pieces, [one.target.of(target) for one in segments], strict=True)
    return found or None


@dataclass(frozen=True)
class WindowRoutes:
    """One rank's transfers, in the order of `route`, and the address of a store that all ranks reach."""

    transfers: Sequence[Transfer]
    receiver: int | None
    """The engine rank; None for the sender."""
    address: tuple[str, int]
    """Host and port."""
    config: RefitConfig

    @property
    def plan(self) -> RefitPlan:
        return RefitPlan(tuple(one.bucket for one in self.transfers))

    def channel(self, memory: Tensor | None, device: torch.device) -> BucketChannel:
        """Join the groups of all transfers. Collective over all ranks with transfers. `memory`: for buckets, if the
        caller has some."""
        store, groups = client_store(*self.address, self.config.timeout_s), dict[object, RefitGroup]()
        for one in self.transfers:
            if one.stream not in groups:
                rank = 0 if self.receiver is None else 1 + one.receivers.index(self.receiver)
                size, name = 1 + len(one.receivers), f"windows {one.sender} {one.receivers}"
                groups[one.stream] = join(store, rank, size, device, self.config.timeout_s, name)
        memory = new_buffers(self.plan, self.config.num_buffers, device) if memory is None else memory
        return BucketChannel(self.plan, [groups[one.stream] for one in self.transfers], memory, is_shared=False)


@dataclass(frozen=True)
class WindowExport:
    """Parameters of a policy rank, and what it needs to send windows of them."""

    parameters: Mapping[int, Tensor]
    """This rank's parameters by number."""
    recipe: Recipe
    replicas: Replicas
    """Both on rank 0 only."""
    memory: Tensor | None
    """Buckets to reuse, of `bucket_bytes` each."""
    bucket_bytes: int
    device: torch.device

    def route(self, needs: Mapping[int, Iterable[Piece]]) -> list[Transfer]:
        """See `route`; on rank 0 only."""
        return route(needs, self.replicas, self.bucket_bytes)

    def join(self, routes: WindowRoutes) -> Sender:
        """Return the sender of this rank's transfers, when their receivers have joined."""
        nbytes, streams = _nbytes(routes.transfers), {one.stream for one in routes.transfers}
        log.info("transport of refits: windows, %d bytes to %d sets of engine ranks", nbytes, len(streams))
        if not routes.transfers:
            return NoConsumers(None)
        channel = routes.channel(self.memory, self.device)
        return BucketSender(channel, routes.config.verify, PieceExport(routes.transfers, self.parameters))


class PieceExport:
    """`Export` of a rank's transfers."""

    def __init__(self, transfers: Sequence[Transfer], parameters: Mapping[int, Tensor]):
        self._transfers, self._parameters = transfers, parameters
        self._copies: dict[int, tuple[int, CopyList]] = {}

    def start(self) -> None:
        """Do nothing: transfers are the only collectives."""

    def begin(self, index: int, report: RefitReport) -> None:
        """Do nothing: other ranks need nothing for this bucket."""

    def fill(self, index: int, buffer: Tensor, report: RefitReport) -> None:
        kept = self._copies.get(index)
        if kept is None or kept[0] != buffer.data_ptr():
            one = self._transfers[index]
            sources = [piece.source.of(self._parameters[piece.parameter]) for piece in one.pieces]
            targets = [view(buffer, slot) for slot in one.bucket.slots]
            kept = self._copies[index] = buffer.data_ptr(), CopyList(targets, sources)
        kept[1].run()

    def finish(self, buffer_of: object) -> None:
        """Do nothing: other ranks wait for none of this rank's collectives."""


Stored = Callable[[Tensor, Tensor], Tensor]
"""Returns, for the target of a received tensor and that tensor, what the engine stores."""


class WindowReceiver:
    """`Receiver` that copies pieces to an engine rank's weights, without its loader."""

    def __init__(self, routes: WindowRoutes, needed: Needed, device: torch.device):
        """Join the senders; returns when they have joined."""
        nbytes, senders = _nbytes(routes.transfers), {one.sender for one in routes.transfers}
        log.info("transport of refits: windows, %d bytes from %d policy ranks", nbytes, len(senders))
        self._pieces = _PieceLoader(routes.transfers, needed)
        self._receiver = BucketReceiver(routes.channel(None, device), routes.config.verify)

    def receive(self, loader: Loader) -> RefitReport:
        return self._receiver.receive(self._pieces)

    def first_differing(self, stored: Stored = lambda _, received: received) -> str | None:
        """Receive the weights that the engine has; return the first tensor with other or missing bytes, or None.

        `stored`: what the engine makes of a received tensor, by the memory that has it.
        """
        self._pieces.stored = stored
        self._receiver.receive(self._pieces)
        self._pieces.stored = None
        return next(iter(self._pieces.differing), None)


class _PieceLoader(Loader):
    """Copies pieces to their targets, or compares what the engine would store there."""

    def __init__(self, transfers: Sequence[Transfer], needed: Needed):
        self._transfers = transfers
        self.stored: Stored | None = None
        """Given while pieces are compared."""
        self._targets: dict[Piece, list[Tensor]] = defaultdict(list)
        for piece, target in needed:
            self._targets[piece].append(target)
        sent = {piece for one in transfers for piece in one.pieces}
        self.differing = [piece.name for piece in self._targets if piece not in sent]
        self._copies: dict[int, tuple[int, CopyList]] = {}

    def fill(self, arrived: ReceivedBucket) -> None:
        if (stored := self.stored) is not None:
            pairs = self._pairs(arrived)
            self.differing += [name for name, target, source in pairs if not same_bytes(target, stored(target, source))]
            return
        kept = self._copies.get(arrived.index)
        if kept is None or kept[0] != arrived.buffer.data_ptr():
            _, targets, sources = zip(*self._pairs(arrived), strict=True)
            kept = self._copies[arrived.index] = arrived.buffer.data_ptr(), CopyList(targets, sources)
        kept[1].run()

    def _pairs(self, arrived: ReceivedBucket) -> list[tuple[str, Tensor, Tensor]]:
        pieces = self._transfers[arrived.index].pieces
        return [
            (piece.name, target, view(arrived.buffer, slot))
            for slot, piece in zip(arrived.bucket.slots, pieces, strict=True)
            for target in self._targets[piece]
        ]
