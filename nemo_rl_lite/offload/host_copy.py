"""A second set of contents for tensors, kept in host memory."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nemo_rl_lite.offload.arena import HostArena
from nemo_rl_lite.offload.storages import host_bytes, lay_out, storages_of


class HostCopy:
    """A snapshot of tensors, storage by storage: `take` copies their contents to the host, `put` copies them back. The
    tensors are the same, and on the device, at both times."""

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
        for span in spans:
            span.of(host).copy_(span.device_bytes(), non_blocking=True)
        self._settle()
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
        for span in spans:
            span.device_bytes().copy_(span.of(host), non_blocking=True)
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
