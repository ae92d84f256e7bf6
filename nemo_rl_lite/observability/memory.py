"""Device memory by phase and component, as one process and as the whole device see it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

# Metric name without "memory/" -> bytes.
Peaks = dict[str, float]


class MemoryMeter:
    """Collects what was measured in named phases until it is taken. `components` tells the bytes that each component of
    the policy takes of the device now.

    - `measured/<phase>/<component>`, at the end of the phase
    - where there is a GPU, `measured/<phase>/activations`: what the allocator handed out during the phase, at the peak;
      `measured/<phase>/other`: what buffers, other processes, CUDA itself and torch's cache held of the device;
      `policy_peak_bytes/<phase>` and `device_bytes/<phase>`: the allocator's peak, and what all held at the end
    """

    def __init__(self, components: Callable[[], Mapping[str, int]]) -> None:
        self._components = components
        self._peaks: Peaks = {}
        self._working: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the block."""
        on_gpu = torch.cuda.is_available()
        held_before = sum(self._components().values())
        allocated = torch.cuda.memory_allocated() if on_gpu else held_before
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            held = self.note(name)
            peak = torch.cuda.max_memory_allocated() if on_gpu else held
            # What came back during the phase is no working memory.
            working = max(peak - allocated - max(held - held_before, 0), 0)
            # It may have come after the peak, so that the largest value seen counts.
            self._working[name] = max(working, self._working.get(name, 0))
            if on_gpu:
                used = device_bytes()
                self._keep(f"measured/{name}/activations", working)
                self._keep(f"measured/{name}/other", max(used - held - working, 0))
                self._keep(f"policy_peak_bytes/{name}", peak)
                self._keep(f"device_bytes/{name}", used)

    def note(self, phase: str) -> int:
        """Measures the components alone; returns their sum in bytes."""
        held = self._components()
        for component, nbytes in held.items():
            self._keep(f"measured/{phase}/{component}", nbytes)
        return sum(held.values())

    def working_bytes(self, phase: str) -> int | None:
        """The most that the phase has taken beyond the components; None before it was measured."""
        return self._working.get(phase)

    def take(self) -> Peaks:
        """What was measured since the last `take`."""
        taken, self._peaks = self._peaks, {}
        return taken

    def _keep(self, name: str, value: float) -> None:
        self._peaks[name] = max(value, self._peaks.get(name, 0.0))


def with_rest(phase: str, memory: Mapping[str, float]) -> dict[str, float]:
    """The metrics and, where the whole device was measured in `phase`, what none of its components accounts for, as
    `measured/<phase>/other`. Where the policy's ranks have other GPUs than the engines, theirs is not part of it."""
    whole = memory.get(f"device_bytes/{phase}")
    if whole is None:
        return dict(memory)
    known = sum(value for name, value in memory.items() if name.startswith(f"measured/{phase}/"))
    return {**memory, f"measured/{phase}/other": max(whole - known, 0.0)}


def device_bytes() -> int:
    """Bytes of the current GPU in use, by whichever process."""
    free, total = torch.cuda.mem_get_info()
    return total - free
