"""Memory that processes share, in place of a device's."""

from contextlib import contextmanager
from pathlib import Path

import torch


class Files:
    """Each allocation is a file that is opened by its path. Files that are gone cannot be opened."""

    def __init__(self, folder: Path):
        self.folder, self.now_open, self.opened_in_all = folder, 0, 0
        self._made, self._opened = list[tuple[torch.Tensor, bytes]](), dict[int, torch.Tensor]()

    def new(self, name: str, tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """A tensor with the same values that begins `offset` bytes after its file."""
        path, nbytes = self.folder / name, tensor.numel() * tensor.element_size()
        path.write_bytes(bytes(offset + nbytes))
        memory = torch.from_file(str(path), shared=True, size=offset + nbytes, dtype=torch.uint8)
        self._made.append((memory, str(path).encode()))
        return memory[offset:].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def allocation(self, address):
        memories = (memory for memory, _ in self._made if 0 <= address - memory.data_ptr() < len(memory))
        memory = next(memories)
        return memory.data_ptr(), len(memory)

    def handle(self, address):
        return next(handle for memory, handle in self._made if memory.data_ptr() == address)

    @contextmanager
    def opened(self, handles):
        addresses = {}
        for handle in handles:
            path = handle.decode()
            memory = torch.from_file(path, shared=True, size=Path(path).stat().st_size, dtype=torch.uint8)
            self._opened[memory.data_ptr()] = memory
            addresses[handle] = memory.data_ptr()
            self.now_open += 1
            self.opened_in_all += 1
        try:
            yield addresses
        finally:
            self.now_open -= len(addresses)

    def tensor_at(self, address, nbytes):
        memory = next(one for begin, one in self._opened.items() if 0 <= address - begin < one.numel())
        return memory[address - memory.data_ptr() :][:nbytes]
