"""The requests that a replica has, and how long it has had some."""

import asyncio
import time
from dataclasses import dataclass, field

from nemo_rl_lite.generation.interface import Completion, Request


@dataclass(eq=False)
class Asked:
    """A request that waits for its answer: the completion, and the replica that gave it."""

    number: int
    request: Request
    answer: asyncio.Future[tuple[Completion, int]]
    near: int | None

    @property
    def place(self) -> tuple[int, int]:
        """The lowest one begins first."""
        return self.request.step, self.number


@dataclass
class Stopwatch:
    """Adds up the seconds in which something is the case."""

    _seconds: float = 0.0
    _since: float | None = None

    def runs(self, is_running: bool) -> None:
        """It is the case from now on, or not."""
        self._seconds, self._since = self.seconds, time.perf_counter() if is_running else None

    @property
    def seconds(self) -> float:
        """All of them so far."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)


@dataclass
class HeldRequests:
    """What one replica has not been told yet, what it works on, and what it shall forget."""

    busy: Stopwatch = field(default_factory=Stopwatch)
    _untold: dict[int, Asked] = field(default_factory=dict)
    _unfinished: dict[int, Asked] = field(default_factory=dict)
    _aborted: list[int] = field(default_factory=list)

    @property
    def load(self) -> int:
        """How many requests it has."""
        return len(self._untold) + len(self._unfinished)

    @property
    def has_work(self) -> bool:
        """Whether there is something to do or to forget."""
        return bool(self.load or self._aborted)

    @property
    def unfinished(self) -> list[int]:
        """The numbers of those that the replica works on, or has not forgotten yet."""
        return [*self._aborted, *self._unfinished]

    def give(self, asked: Asked) -> None:
        self._untold[asked.number] = asked

    def tell(self) -> tuple[dict[int, Request], list[int]]:
        """Return what the replica is told now: requests by number, and the numbers of those that it shall forget."""
        told, self._untold = self._untold, {}
        aborted, self._aborted = self._aborted, []
        self._unfinished |= told
        return {number: asked.request for number, asked in told.items()}, aborted

    def finish(self, number: int) -> Asked | None:
        """The replica has answered; None where nobody waits for it any more."""
        return self._unfinished.pop(number, None)

    def drop(self, asked: Asked) -> None:
        """Nobody waits for this answer any more."""
        self._untold.pop(asked.number, None)
        if self._unfinished.pop(asked.number, None):
            self._aborted.append(asked.number)

    @property
    def requests(self) -> list[Asked]:
        """All that it has been given and has not answered."""
        return [*self._unfinished.values(), *self._untold.values()]

    def clear(self) -> None:
        self._untold, self._unfinished, self._aborted = {}, {}, []
