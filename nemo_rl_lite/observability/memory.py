"""Peak GPU memory by phase, as one process and as the whole device see it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Metric name without the phase -> bytes.
Peaks = dict[str, float]


class MemoryMeter:
    """Collects peaks of named phases until they are taken. Does nothing where there is no GPU."""

    def __init__(self) -> None:
        self._peaks: Peaks = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Collects `policy_peak_bytes/<name>`, the most that torch's allocator handed out in this process during the
        block, and `device_bytes/<name>`, what all processes held of the device when it ended."""
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            self._keep(f"policy_peak_bytes/{name}", torch.cuda.max_memory_allocated())
            self._keep(f"device_bytes/{name}", device_bytes())

    def take(self) -> Peaks:
        """Peaks since the last `take`."""
        taken, self._peaks = self._peaks, {}
        return taken

    def _keep(self, name: str, value: float) -> None:
        self._peaks[name] = max(value, self._peaks.get(name, 0.0))


def device_bytes() -> int:
    """Bytes of the current GPU in use, by whichever process."""
    free, total = torch.cuda.mem_get_info()
    return total - free
