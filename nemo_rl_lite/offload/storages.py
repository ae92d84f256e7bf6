"""Find the storages behind tensors and lay them out in host memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from nemo_rl_lite.compat.torch import storage_id

# Each storage starts at a multiple of this many bytes in host memory.
ALIGNMENT = 512


@dataclass(frozen=True)
class Span:
    """A storage of `nbytes`, whose copy begins `start` bytes into host memory."""

    storage: UntypedStorage
    start: int
    nbytes: int

    def of(self, host: Tensor) -> Tensor:
        """Return the copy's bytes, uint8 [nbytes], within the host memory `host`."""
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
