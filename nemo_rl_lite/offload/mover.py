"""Moves of tensors between their device and host memory, in place, so that every view of them survives.

A move frees the memory behind a tensor by resizing its storage to zero, and allocates it again by resizing it back:
the tensor objects that a model and its optimizer hold stay the same. Moves begin and complete; in between, their
copies run on separate streams, overlapped with the device's work.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from nemo_rl_lite.compat.torch import storage_id
from nemo_rl_lite.offload.host_memory import Copies, HostArena

# Each storage starts at a multiple of this many bytes in host memory.
ALIGNMENT = 512
# The link's rate that is assumed until a move has measured it.
ASSUMED_BYTES_PER_S = 20e9


@dataclass(frozen=True)
class Span:
    """Storage of `nbytes`, whose copy begins `start` bytes into host memory."""

    storage: UntypedStorage
    start: int
    nbytes: int

    def of(self, host: Tensor) -> Tensor:
        """Return the copy's bytes, uint8 [nbytes], in the host memory `host`."""
        return host[self.start : self.start + self.nbytes]

    def device_bytes(self) -> Tensor:
        """Return the storage's bytes, uint8 [nbytes]."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return whole.set_(self.storage, 0, (self.nbytes,), (1,))


def storages_of(tensors: Iterable[Tensor], device: torch.device) -> list[UntypedStorage]:
    """Return the tensors' storages with memory on such a device, each once, in the tensors' order."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == device.type and storage.nbytes():
            found.setdefault(storage_id(storage), storage)
    return list(found.values())


def lay_out(storages: Iterable[UntypedStorage]) -> list[Span]:
    """Give each storage a place in host memory, one after the other."""
    spans, end = [], 0
    for storage in storages:
        spans.append(Span(storage, end, storage.nbytes()))
        end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    return spans


def host_bytes(spans: Sequence[Span]) -> int:
    """Return the bytes of host memory that the copies take."""
    return spans[-1].start + spans[-1].nbytes if spans else 0


class HostCopy:
    """Snapshot of tensors' storages in host memory. The tensors are the same, and on the device, at `take` and
    `put`."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], arena: HostArena, device: torch.device):
        self._tensors, self._arena, self._device = tensors, arena, device
        self._taken: list[int] | None = None

    def take(self) -> None:
        """Copy the tensors' memory to the host; complete when this returns.

        Raises:
            HostMemoryError: there is too little host memory.
        """
        spans = lay_out(storages_of(self._tensors(), self._device))
        host = self._arena.reserve(host_bytes(spans))
        self._copy([(span.of(host), span.device_bytes()) for span in spans])
        self._taken = [span.nbytes for span in spans]

    def put(self) -> None:
        """Copy the contents back to the device; complete when this returns.

        Raises:
            RuntimeError: nothing was taken, or it was taken from other tensors.
        """
        spans = lay_out(storages_of(self._tensors(), self._device))
        if self._taken != [span.nbytes for span in spans]:
            raise RuntimeError("the tensors are not those whose contents were taken")
        host = self._arena.reserve(host_bytes(spans))
        self._copy([(span.device_bytes(), span.of(host)) for span in spans])

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class Move:
    """Finished move: its bytes, the seconds of its copies, and the seconds that this process waited for them."""

    nbytes: int
    transfer_s: float
    exposed_s: float


def move_metrics(moves: Mapping[str, Move]) -> dict[str, float]:
    """Return `<component>/<direction>_bytes`, `_s` (the transfer), `_exposed_s` (waited for) and `_gb_per_s`."""
    metrics: dict[str, float] = {}
    for name, move in moves.items():
        metrics[f"{name}_bytes"] = float(move.nbytes)
        metrics[f"{name}_s"] = move.transfer_s
        metrics[f"{name}_exposed_s"] = move.exposed_s
        metrics[f"{name}_gb_per_s"] = move.nbytes / move.transfer_s / 1e9 if move.transfer_s else 0.0
    return metrics


@dataclass
class _Pending:
    """Move in flight: its direction, its storages, the seconds that its start took, and its copies."""

    to_host: bool
    spans: list[Span]
    begun_s: float
    copies: Copies


class Movable:
    """Tensors of one component, e.g. all optimizer states. Not thread-safe.

    Each move to the host calls `tensors`, which may return more each time: an optimizer makes its states at the first
    step.
    """

    def __init__(
        self, name: str, tensors: Callable[[], Iterable[Tensor]], arena: HostArena, device: torch.device
    ) -> None:
        self.name = name
        self._tensors, self._arena, self._device = tensors, arena, device
        # What is in host memory alone, once no move is pending.
        self._parked: list[Span] = []
        self._pending: _Pending | None = None
        self._moves: list[tuple[str, Move]] = []
        self._rate = ASSUMED_BYTES_PER_S
        self._counted: int | None = None
        on_gpu = device.type == "cuda"
        self._streams = {to_host: torch.cuda.Stream(device) if on_gpu else None for to_host in (True, False)}

    @property
    def on_host(self) -> bool:
        """True if the contents are in host memory alone."""
        return bool(self._parked) and self._pending is None

    @property
    def moving(self) -> bool:
        """True if a move has begun and not settled."""
        return self._pending is not None

    @property
    def returning(self) -> bool:
        """True if a move to the device has begun and not settled."""
        return self._pending is not None and not self._pending.to_host

    @property
    def moved(self) -> bool:
        """True if a move has begun and `synchronize` would not wait."""
        return self._pending is not None and self._pending.copies.done()

    def device_bytes(self) -> int:
        """Return the bytes of device memory that the tensors take, counted again after a move or `recount`."""
        if self._counted is None:
            self._counted = sum(storage.nbytes() for storage in storages_of(self._tensors(), self._device))
        return self._counted

    def recount(self) -> None:
        """Forget the count, because there may be more or larger tensors than before."""
        self._counted = None

    def host_bytes(self) -> int:
        """Return the bytes that are in host memory, or will be when a move out settles. Coming back takes as many on
        the device."""
        parked = self._parked
        if self._pending is not None:
            parked = self._pending.spans if self._pending.to_host else []
        return sum(one.nbytes for one in parked)

    def seconds_to_return(self) -> float:
        """Return the seconds that coming back will take, at the last move's rate."""
        return self.host_bytes() / self._rate

    def leave(self) -> None:
        """Begin to copy everything to the host, unless it is there. Device memory is freed when the move settles; until
        then the tensors may be read, not written.

        Raises:
            HostMemoryError: there is too little host memory; the tensors are as before.
        """
        self.synchronize()
        if self._parked:
            return
        began = time.perf_counter()
        spans = lay_out(storages_of(self._tensors(), self._device))
        host = self._arena.reserve(host_bytes(spans))
        copies = Copies([(one.of(host), one.device_bytes()) for one in spans], self._streams[True])
        self._pending = _Pending(True, spans, time.perf_counter() - began, copies)

    def come_back(self) -> None:
        """Begin to copy everything back to the device, unless it is there. The tensors may be used when the move has
        settled.

        Raises:
            torch.OutOfMemoryError: the device is too full; the contents stay in host memory.
        """
        self.synchronize()
        if not self._parked:
            return
        began = time.perf_counter()
        try:
            for one in self._parked:
                one.storage.resize_(one.nbytes)
        except BaseException:
            _free(self._parked)
            raise
        host = self._arena.reserve(host_bytes(self._parked))
        copies = Copies([(one.device_bytes(), one.of(host)) for one in self._parked], self._streams[False])
        self._pending = _Pending(False, self._parked, time.perf_counter() - began, copies)
        self.recount()

    def synchronize(self, alone: bool = False) -> None:
        """Wait until the move in flight, if any, is done. `alone`: the device has no other work meanwhile."""
        if self._pending is None:
            return
        pending, waiting = self._pending, time.perf_counter()
        pending.copies.wait(alone)
        if pending.to_host:
            _free(pending.spans)
        self._parked, self._pending = (pending.spans if pending.to_host else []), None
        self.recount()
        nbytes = sum(one.nbytes for one in pending.spans)
        exposed_s = pending.begun_s + time.perf_counter() - waiting
        if nbytes:
            move = Move(nbytes, pending.copies.seconds(), exposed_s)
            self._moves.append((f"{self.name}/{'to_host' if pending.to_host else 'to_device'}", move))
            self._rate = nbytes / move.transfer_s if move.transfer_s else self._rate

    def pop_moves(self) -> list[tuple[str, Move]]:
        """Return the moves that have settled since the last call, as "<name>/to_host" or "<name>/to_device"."""
        taken, self._moves = self._moves, []
        return taken

    def release(self) -> None:
        """Free the host memory.

        Raises:
            RuntimeError: host memory has the only copy of the contents.
        """
        self.synchronize()
        if self._parked:
            raise RuntimeError(f"{self.name} are in host memory only: come back before it is released")
        self._arena.release()


def _free(spans: Iterable[Span]) -> None:
    for span in spans:
        span.storage.resize_(0)


class FrozenWeights(Movable):
    """Tensors of constant contents: the first move to the host copies them, later ones only free the device's memory.
    Each move is complete when its method returns."""

    _copied: list[Span] | None = None

    def leave(self) -> None:
        """See `Movable.leave`."""
        if self._copied is None:
            super().leave()
            self.synchronize(alone=True)
            self._copied = self._parked
        elif not self._parked:
            _free(self._copied)
            self._parked = self._copied
            self.recount()

    def come_back(self) -> None:
        """See `Movable.come_back`."""
        super().come_back()
        self.synchronize(alone=True)
