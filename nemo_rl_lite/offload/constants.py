"""Weights that never change: the first move to the host copies them, every later one only frees the device's memory."""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nemo_rl_lite.offload.arena import HostArena
from nemo_rl_lite.offload.copies import Copies
from nemo_rl_lite.offload.mover import Move
from nemo_rl_lite.offload.storages import Span, host_bytes, lay_out, storages_of


class Constants:
    """Tensors of constant contents, which leave their device and come back in place: every view of them survives. Each
    move is complete when its method returns. Moving them to where they are does nothing."""

    def __init__(
        self, name: str, tensors: Callable[[], Iterable[Tensor]], arena: HostArena, device: torch.device
    ) -> None:
        self._name, self._arena, self._device = name, arena, device
        self._spans: list[Span] = lay_out(storages_of(tensors(), device))
        self._moves: list[tuple[str, Move]] = []
        self._is_here, self._copied = True, False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def device_bytes(self) -> int:
        """Return the bytes of device memory that the tensors take."""
        return sum(span.nbytes for span in self._spans) if self._is_here else 0

    def leave(self) -> None:
        """Free the device's memory.

        Raises:
            HostMemoryError: there is too little host memory for the copy; the tensors are as before.
        """
        if not self._is_here:
            return
        if not self._copied:
            host = self._arena.reserve(host_bytes(self._spans))
            self._copy("to_host", [(span.of(host), span.device_bytes()) for span in self._spans])
            self._copied = True
        self._free()

    def come_back(self) -> None:
        """Copy the contents back to the device.

        Raises:
            torch.OutOfMemoryError: the device is too full; the contents stay in host memory.
        """
        if self._is_here:
            return
        try:
            for span in self._spans:
                span.storage.resize_(span.nbytes)
        except BaseException:
            self._free()
            raise
        host = self._arena.reserve(host_bytes(self._spans))
        self._copy("to_device", [(span.device_bytes(), span.of(host)) for span in self._spans])
        self._is_here = True

    def take_moves(self) -> list[tuple[str, Move]]:
        """Return the copies since the last call, each with "<name>/to_host" or "<name>/to_device"."""
        taken, self._moves = self._moves, []
        return taken

    def _free(self) -> None:
        for span in self._spans:
            span.storage.resize_(0)
        self._is_here = False

    def _copy(self, direction: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
        began = time.perf_counter()
        copies = Copies(pairs, self._stream)
        copies.wait(alone=True)
        nbytes = sum(span.nbytes for span in self._spans)
        move = Move(nbytes, copies.seconds(), time.perf_counter() - began)
        self._moves.append((f"{self._name}/{direction}", move))
