"""Move tensors from their device to host memory and back in place, so that every view of them survives.

A move frees the memory behind a tensor by resizing its storage to zero and allocates it again by resizing it back, so
the tensor objects that a model and its optimizer hold stay the same. A move is begun and settled; between the two, its
copies run on separate streams, overlapped with the device's work.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.offload.arena import HostArena
from nemo_rl_lite.offload.copies import Copies
from nemo_rl_lite.offload.storages import Span, host_bytes, lay_out, storages_of

# The link's rate that is assumed until a move has measured it.
ASSUMED_BYTES_PER_S = 20e9


@dataclass(frozen=True)
class Move:
    """A finished move: its bytes, the seconds of its copies, and the seconds for which this process waited for them."""

    nbytes: int
    transfer_s: float
    exposed_s: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.transfer_s / 1e9 if self.transfer_s else 0.0


def move_metrics(moves: Mapping[str, Move]) -> dict[str, float]:
    """Return `<component>/<direction>_bytes`, `_s` (the transfer), `_exposed_s` (waited for) and `_gb_per_s`."""
    return {
        f"{name}_{unit}": value
        for name, move in moves.items()
        for unit, value in (
            ("bytes", float(move.nbytes)),
            ("s", move.transfer_s),
            ("exposed_s", move.exposed_s),
            ("gb_per_s", move.gb_per_s),
        )
    }


@dataclass
class _Flight:
    """A move that was begun: its direction, its storages, the seconds that beginning took, and its copies."""

    to_host: bool
    parked: list[Span]
    begun_s: float
    copies: Copies


class Movable:
    """The tensors of one component, e.g. all optimizer states.

    Each move out calls `tensors` again, which may return more each time (an optimizer may make its states at the first
    step). Not thread-safe.
    """

    def __init__(
        self, name: str, tensors: Callable[[], Iterable[Tensor]], arena: HostArena, device: torch.device
    ) -> None:
        self.name = name
        self._tensors, self._arena, self._device = tensors, arena, device
        self._parked: list[Span] = []
        self._flight: _Flight | None = None
        self._moves: list[tuple[str, Move]] = []
        self._rate = ASSUMED_BYTES_PER_S
        self._counted: int | None = None
        on_gpu = device.type == "cuda"
        self._streams = {to_host: torch.cuda.Stream(device) if on_gpu else None for to_host in (True, False)}

    @property
    def on_host(self) -> bool:
        """True where the contents are in host memory alone."""
        return bool(self._parked) and self._flight is None

    @property
    def moving(self) -> bool:
        """True where a move has begun and not settled."""
        return self._flight is not None

    @property
    def returning(self) -> bool:
        """True where a move to the device has begun and not settled."""
        return self._flight is not None and not self._flight.to_host

    @property
    def moved(self) -> bool:
        """True where a move has begun and `settle` would not wait."""
        return self._flight is not None and self._flight.copies.done()

    def device_bytes(self) -> int:
        """Return the bytes of device memory that the tensors take. Counted again after a move and after `recount`."""
        if self._counted is None:
            self._counted = sum(storage.nbytes() for storage in storages_of(self._tensors(), self._device))
        return self._counted

    def recount(self) -> None:
        """Forget the count, because there may be more or larger tensors than before."""
        self._counted = None

    def host_bytes(self) -> int:
        """Return the bytes that are in host memory, or will be when a move out settles: the device memory that coming
        back takes."""
        parked = self._parked if self._flight is None else self._flight.parked if self._flight.to_host else []
        return sum(one.nbytes for one in parked)

    def seconds_to_return(self) -> float:
        """Return how long coming back will take, by the last move's rate."""
        return self.host_bytes() / self._rate

    def leave(self) -> None:
        """Begin to copy everything to the host; does nothing where it is there already. Device memory is freed when the
        move settles; until then the tensors may be read, not written.

        Raises:
            HostMemoryError: there is too little host memory; the tensors are as before.
        """
        self.settle()
        if self._parked:
            return
        began = time.perf_counter()
        parked = lay_out(storages_of(self._tensors(), self._device))
        host = self._arena.reserve(host_bytes(parked))
        copies = Copies([(one.of(host), one.device_bytes()) for one in parked], self._streams[True])
        self._flight = _Flight(True, parked, time.perf_counter() - began, copies)

    def come_back(self) -> None:
        """Begin to copy everything back to the device; does nothing where it is there already. The tensors may be used
        when the move has settled.

        Raises:
            torch.OutOfMemoryError: the device is too full; the contents stay in host memory.
        """
        self.settle()
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
        self._flight = _Flight(False, self._parked, time.perf_counter() - began, copies)
        self.recount()

    def settle(self, alone: bool = False) -> None:
        """Wait until the move that has begun, if any, is done. `alone`: the device has no other work meanwhile."""
        if self._flight is None:
            return
        flight, waiting = self._flight, time.perf_counter()
        flight.copies.wait(alone)
        if flight.to_host:
            _free(flight.parked)
        self._parked, self._flight = (flight.parked if flight.to_host else []), None
        self.recount()
        nbytes = sum(one.nbytes for one in flight.parked)
        exposed_s = flight.begun_s + time.perf_counter() - waiting
        if nbytes:
            move = Move(nbytes, flight.copies.seconds(), exposed_s)
            self._moves.append((f"{self.name}/{'to_host' if flight.to_host else 'to_device'}", move))
            self._rate = nbytes / move.transfer_s if move.transfer_s else self._rate

    def take_moves(self) -> list[tuple[str, Move]]:
        """Return the moves that have settled since the last call, each with "<name>/to_host" or "<name>/to_device"."""
        taken, self._moves = self._moves, []
        return taken

    def release(self) -> None:
        """Free the host memory.

        Raises:
            RuntimeError: the only copy of the contents is there.
        """
        self.settle()
        if self._parked:
            raise RuntimeError(f"{self.name} are in host memory only: come back before it is released")
        self._arena.release()


def _free(parked: list[Span]) -> None:
    for one in parked:
        one.storage.resize_(0)
