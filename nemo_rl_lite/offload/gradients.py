"""`GradientBuffers` frees gradient memory between accumulations and allocates it again as zeros."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


class GradientBuffers:
    """Buffers that hold nothing worth keeping between two optimizer steps. Views of them survive."""

    def __init__(self, buffers: Sequence[Tensor]):
        self._buffers = list(buffers)
        self._sizes = [buffer.untyped_storage().nbytes() for buffer in buffers]
        self._accumulating = False
        self._dropped = False

    def device_bytes(self) -> int:
        """Return the bytes of device memory that the buffers take now."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Mark that gradients accumulate within the block and must not be dropped.

        Raises:
            RuntimeError: the buffers have no memory.
        """
        if self._dropped:
            raise RuntimeError("gradients have no memory in this phase: prepare_for_training comes before train")
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def drop(self) -> None:
        """Free the memory; does nothing where it is free already.

        Raises:
            RuntimeError: gradients are being accumulated.
        """
        if self._accumulating:
            raise RuntimeError("gradients are being accumulated and must not be dropped")
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)
        self._dropped = True

    def bring_back(self) -> None:
        """Allocate the memory again, filled with zeros; does nothing where the buffers have it."""
        if not self._dropped:
            return
        for buffer, nbytes in zip(self._buffers, self._sizes, strict=True):
            buffer.untyped_storage().resize_(nbytes)
            buffer.zero_()
        self._dropped = False
