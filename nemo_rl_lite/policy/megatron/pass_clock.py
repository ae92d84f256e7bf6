"""How long this rank's own part of a pass takes: from where data-parallel replicas have agreed on the micro-batches to
where they exchange gradients, or where scores are complete. What replicas wait for each other is not part of it; what
ranks of one replica wait for each other is."""

import time
from collections.abc import Sequence

import torch

Mark = torch.cuda.Event | float
"""A place in a GPU's stream, or the host's time in seconds."""


class PassClock:
    """Marks the beginning and the end of passes. On a GPU these are places in its stream, so that the host does not
    wait until they are read. Passes are kept where they are `compared` with those of other replicas."""

    def __init__(self, device: torch.device, compared: bool):
        self._device, self._compared = device, compared
        self._marks: list[Mark] = []
        self._kept: dict[str, list[Sequence[Mark]]] = {}

    def begin(self) -> None:
        self._marks = [self._mark()]

    def end(self) -> None:
        self._marks.append(self._mark())

    def keep(self, name: str) -> None:
        """Keep the pass that has just ended, until `take`."""
        if self._compared:
            self._kept.setdefault(name, []).append(self._marks)

    def take(self) -> dict[str, list[float]]:
        """The seconds of the passes that were kept since the last call, by name."""
        kept, self._kept = self._kept, {}
        return {name: [_seconds(*marks) for marks in passes] for name, passes in kept.items()}

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    return end - begin  # pyrefly: ignore  # both are the host's
