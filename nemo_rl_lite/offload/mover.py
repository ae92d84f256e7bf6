"""Offload tensors to host memory and reload them, in place, so that every view survives.

Device memory is freed by resizing a tensor's storage to zero, and allocated by resizing it back. So models and
optimizers keep their tensor objects. Copies run on separate streams, overlapped with other work.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from nemo_rl_lite.compat.torch import storage_id
from nemo_rl_lite.offload.host_memory import ALIGNMENT, Copies, HostArena

# The link's bandwidth before the first measurement.
ASSUMED_BYTES_PER_S = 20e9
# Elements of a part of `HostCopy.blend`, which needs a few copies of it on the device.
_BLENDED = 1 << 24


@dataclass(frozen=True)
class Span:
    """Storage of `nbytes`, and the offset `start` of its copy in host memory."""

    storage: UntypedStorage
    start: int
    nbytes: int

    def of(self, host: Tensor) -> Tensor:
        """Return the copy in `host`, uint8 [nbytes]."""
        return host[self.start : self.start + self.nbytes]

    def device_bytes(self) -> Tensor:
        """Return the storage, uint8 [nbytes]."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return whole.set_(self.storage, 0, (self.nbytes,), (1,))


def storages_of(tensors: Iterable[Tensor], device: torch.device) -> list[UntypedStorage]:
    """Return the tensors' distinct storages with memory on this type of device, in order."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == device.type and storage.nbytes():
            found.setdefault(storage_id(storage), storage)
    return list(found.values())


def lay_out(storages: Iterable[UntypedStorage]) -> list[Span]:
    """Assign consecutive, aligned offsets in host memory."""
    spans, end = [], 0
    for storage in storages:
        spans.append(Span(storage, end, storage.nbytes()))
        end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    return spans


def host_bytes(spans: Sequence[Span]) -> int:
    return spans[-1].start + spans[-1].nbytes if spans else 0


class HostCopy:
    """Snapshot of tensors in host memory. `take` and `put` need the same tensors, on the device."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], arena: HostArena, device: torch.device):
        self._tensors, self._arena, self._device = tensors, arena, device
        self._taken: list[int] | None = None

    def take(self) -> None:
        """Copy the tensors to the host, blocking. Raises HostMemoryError: free host memory is too small."""
        spans = lay_out(storages_of(self._tensors(), self._device))
        host = self._arena.reserve(host_bytes(spans))
        self._copy([(span.of(host), span.device_bytes()) for span in spans])
        self._taken = [span.nbytes for span in spans]

    def put(self) -> None:
        """Copy the contents back to the device, blocking. Raises RuntimeError: they were not taken from these
        tensors."""
        spans = lay_out(storages_of(self._tensors(), self._device))
        if self._taken != [span.nbytes for span in spans]:
            raise RuntimeError("the tensors are not those whose contents were taken")
        host = self._arena.reserve(host_bytes(spans))
        self._copy([(span.device_bytes(), span.of(host)) for span in spans])

    def blend(self, share: float) -> None:
        """Set the copy to `share` x the tensors + (1 - `share`) x the copy, computed in float32 and rounded."""
        tensors = list(self._tensors())
        types = {storage_id(tensor.untyped_storage()): tensor.dtype for tensor in tensors}
        spans = lay_out(storages_of(tensors, self._device))
        host = self._arena.reserve(host_bytes(spans))
        for span in spans:
            kind = types[storage_id(span.storage)]
            parts = span.of(host).view(kind).split(_BLENDED), span.device_bytes().view(kind).split(_BLENDED)
            for kept, new in zip(*parts, strict=True):
                blended = kept.to(self._device).float().lerp(new.float(), share).to(kind)
                kept.copy_(blended if kind.is_floating_point else new)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class Move:
    """Finished move: bytes, transfer time, and blocking (exposed) time."""

    nbytes: int
    transfer_s: float
    exposed_s: float


def move_metrics(moves: Mapping[str, Move]) -> dict[str, float]:
    """Return `<component>/<direction>_bytes`, `_s` (transfer), `_exposed_s` (blocking) and `_gb_per_s`."""
    metrics: dict[str, float] = {}
    for name, move in moves.items():
        metrics[f"{name}_bytes"] = float(move.nbytes)
        metrics[f"{name}_s"] = move.transfer_s
        metrics[f"{name}_exposed_s"] = move.exposed_s
        metrics[f"{name}_gb_per_s"] = move.nbytes / move.transfer_s / 1e9 if move.transfer_s else 0.0
    return metrics


@dataclass
class _Pending:
    """Move in flight."""

    to_host: bool
    spans: list[Span]
    started_s: float
    """Seconds that the start took."""
    copies: Copies


class Movable:
    """Tensors of one component, such as all optimizer states. Not thread-safe.

    Each offload calls `tensors`, which may return more than before: optimizers make their states at the first step.
    """

    def __init__(
        self, name: str, tensors: Callable[[], Iterable[Tensor]], arena: HostArena, device: torch.device
    ) -> None:
        self.name = name
        self._tensors, self._arena, self._device = tensors, arena, device
        # Storages whose only copy is in host memory, if no move is in flight.
        self._parked: list[Span] = []
        self._pending: _Pending | None = None
        self._moves: list[tuple[str, Move]] = []
        self._rate = ASSUMED_BYTES_PER_S
        self._counted: int | None = None
        on_gpu = device.type == "cuda"
        self._streams = {to_host: torch.cuda.Stream(device) if on_gpu else None for to_host in (True, False)}

    @property
    def on_host(self) -> bool:
        """True if host memory has the only copy of the contents."""
        return bool(self._parked) and self._pending is None

    @property
    def moving(self) -> bool:
        """True if a move is in flight."""
        return self._pending is not None

    @property
    def reloading(self) -> bool:
        """True if a move to the device is in flight."""
        return self._pending is not None and not self._pending.to_host

    @property
    def done(self) -> bool:
        """True if a move is in flight and its copies are done."""
        return self._pending is not None and self._pending.copies.done()

    def device_bytes(self) -> int:
        """Return the tensors' bytes on the device; cached until a move or `recount`."""
        if self._counted is None:
            self._counted = sum(storage.nbytes() for storage in storages_of(self._tensors(), self._device))
        return self._counted

    def recount(self) -> None:
        """Clear the cached count, because tensors may have been added or grown."""
        self._counted = None

    def host_bytes(self) -> int:
        """Return the bytes in host memory once the move in flight, if any, is done. A reload takes as many on the
        device."""
        parked = self._parked
        if self._pending is not None:
            parked = self._pending.spans if self._pending.to_host else []
        return sum(one.nbytes for one in parked)

    def reload_s(self) -> float:
        """Return the seconds that a reload will take, at the last move's bandwidth."""
        return self.host_bytes() / self._rate

    def offload(self) -> None:
        """Start to copy everything to the host, unless it is there. Until `synchronize` frees the device memory, the
        tensors may be read but not written. Raises HostMemoryError: nothing has moved."""
        self.synchronize()
        if self._parked:
            return
        began = time.perf_counter()
        spans = lay_out(storages_of(self._tensors(), self._device))
        host = self._arena.reserve(host_bytes(spans))
        copies = Copies([(one.of(host), one.device_bytes()) for one in spans], self._streams[True])
        self._pending = _Pending(True, spans, time.perf_counter() - began, copies)

    def reload(self) -> None:
        """Start to copy everything back to the device, unless it is there. The tensors may be used after `synchronize`.
        Raises torch.OutOfMemoryError: the contents stay in host memory."""
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
        """Finish the move in flight, if any. `alone`: the device has no other work meanwhile."""
        if self._pending is None:
            return
        pending, waiting = self._pending, time.perf_counter()
        pending.copies.wait(alone)
        if pending.to_host:
            _free(pending.spans)
        self._parked, self._pending = (pending.spans if pending.to_host else []), None
        self.recount()
        nbytes = sum(one.nbytes for one in pending.spans)
        exposed_s = pending.started_s + time.perf_counter() - waiting
        if nbytes:
            move = Move(nbytes, pending.copies.seconds(), exposed_s)
            self._moves.append((f"{self.name}/{'to_host' if pending.to_host else 'to_device'}", move))
            self._rate = nbytes / move.transfer_s if move.transfer_s else self._rate

    def pop_moves(self) -> list[tuple[str, Move]]:
        """Return the moves finished since the last call, by "<name>/to_host" or "<name>/to_device"."""
        taken, self._moves = self._moves, []
        return taken

    def release(self) -> None:
        """Free the host memory. Raises RuntimeError: it has the only copy of the contents."""
        self.synchronize()
        if self._parked:
            raise RuntimeError(f"{self.name} are in host memory only: reload them before its release")
        self._arena.release()


def _free(spans: Iterable[Span]) -> None:
    for span in spans:
        span.storage.resize_(0)


class FrozenWeights(Movable):
    """Constant tensors: the first offload copies them, later ones only free device memory. Moves are blocking."""

    _copied: list[Span] | None = None

    def offload(self) -> None:
        if self._copied is None:
            super().offload()
            self.synchronize(alone=True)
            self._copied = self._parked
        elif not self._parked:
            _free(self._copied)
            self._parked = self._copied
            self.recount()

    def reload(self) -> None:
        super().reload()
        self.synchronize(alone=True)
