"""Measure device memory by phase and component, of this process and of the whole device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

# Bytes by metric name without "memory/".
Peaks = dict[str, float]


class MemoryMeter:
    """Measures named phases. `components` returns the current device bytes of each component of the policy.

    - `measured/<phase>/<component>`: bytes held throughout the phase
    - `measured/<phase>/activations` (GPU): peak of additional allocations
    - `measured/<phase>/other` (GPU): buffers, other processes, CUDA and torch's cache
    - `policy_peak_bytes/<phase>`, with cached blocks `policy_reserved_bytes/<phase>` (GPU): the allocator's peaks
    - `device_bytes/<phase>` (GPU): all bytes in use at the end
    """

    def __init__(self, components: Callable[[], Mapping[str, int]]) -> None:
        self._components = components
        self._peaks: Peaks = {}
        self._working: dict[str, int] = {}
        # Current phase: bytes outside components, bytes of components, and the peaks so far.
        self._outside = self._held = self._peak = self._reserved = self._most = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as the phase `name`."""
        before = dict(self._components())
        self._outside = torch.cuda.memory_allocated() - sum(before.values()) if torch.cuda.is_available() else 0
        self._peak = self._reserved = self._most = 0
        self._begin_segment()
        try:
            yield
        finally:
            self._end_segment()
            after = self._components()
            throughout = {component: min(nbytes, after[component]) for component, nbytes in before.items()}
            for component, nbytes in throughout.items():
                self._keep(f"measured/{name}/{component}", nbytes)
            self._working[name] = max(self._most, self._working.get(name, 0))
            if torch.cuda.is_available():
                used = device_bytes()
                self._keep(f"measured/{name}/activations", self._most)
                self._keep(f"measured/{name}/other", max(used - sum(throughout.values()) - self._most, 0))
                self._keep(f"policy_peak_bytes/{name}", self._peak)
                self._keep(f"policy_reserved_bytes/{name}", self._reserved)
                self._keep(f"device_bytes/{name}", used)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Enclose a move of components within a phase: their bytes are not working memory."""
        self._end_segment()
        yield
        self._begin_segment()

    def note(self, phase: str) -> None:
        """Record the components' current bytes."""
        for component, nbytes in self._components().items():
            self._keep(f"measured/{phase}/{component}", nbytes)

    def working_bytes(self, phase: str) -> int | None:
        """Return the peak of the phase without the components; None if not measured yet."""
        return self._working.get(phase)

    def take(self) -> Peaks:
        """Return the measurements since the last `take`."""
        taken, self._peaks = self._peaks, {}
        return taken

    def _begin_segment(self) -> None:
        self._held = sum(self._components().values())
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _end_segment(self) -> None:
        peak = self._held + self._outside
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        self._peak = max(self._peak, peak)
        self._most = max(self._most, peak - self._held - self._outside)

    def _keep(self, name: str, value: float) -> None:
        self._peaks[name] = max(value, self._peaks.get(name, 0.0))


def with_rest(phase: str, memory: Mapping[str, float]) -> dict[str, float]:
    """Add `measured/<phase>/other`, the bytes of no component, if the device was measured in `phase`."""
    whole = memory.get(f"device_bytes/{phase}")
    if whole is None:
        return dict(memory)
    known = sum(value for name, value in memory.items() if name.startswith(f"measured/{phase}/"))
    return {**memory, f"measured/{phase}/other": max(whole - known, 0.0)}


def device_bytes() -> int:
    """Return the bytes of the current GPU that all processes use."""
    free, total = torch.cuda.mem_get_info()
    return total - free
