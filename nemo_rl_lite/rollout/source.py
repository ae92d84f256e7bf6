"""Where the loop gets its rollouts from, and when the engines get new weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.rollout.collector import Show
from nemo_rl_lite.rollout.episode import Rollout
from nemo_rl_lite.rollout.sampler import Sampler


class RolloutSource(Protocol):
    """In each step the loop takes a rollout, trains on it, waits until the engines may have new weights, and publishes
    those."""

    def take(self, step: int, show: Show) -> Rollout:
        """Return the rollout of a step; `show` is told how far it is."""
        ...

    def finish_generation(self) -> dict[str, float]:
        """The policy needs its devices: leave those that it shares with engines. Returns metrics of their memory."""
        ...

    def settle(self, show: Show) -> None:
        """Wait until the engines may have new weights."""
        ...

    def publish(self, step: int) -> dict[str, float]:
        """Bring the weights that this step made to the engines; returns metrics."""
        ...

    def held_out(self, step: int, show: Show) -> Rollout:
        """Sample the held-out problems with the engines' present weights."""
        ...

    def save(self, folder: Path) -> Mapping[str, Any]:
        """Return what a checkpoint needs, for a run that resumes from it; what is large is written to the folder."""
        ...

    def close(self) -> None:
        """The run ends, in whatever way: leave nothing that works for it."""
        ...


class Engines(Protocol):
    """The engines, as a source steers them."""

    def refit(self, version: int) -> dict[str, float]:
        """Bring the weights that a step made to the engines, and bring engines back that have died; returns metrics."""
        ...

    def finish_generation(self) -> dict[str, float]:
        """See `Generation.finish_generation`."""
        ...


class OnPolicy:
    """Generates, then trains on it: each rollout is sampled by the weights that it trains."""

    def __init__(self, sampler: Sampler, engines: Engines):
        self._sampler, self._engines = sampler, engines

    def take(self, step: int, show: Show) -> Rollout:
        return self._sampler.rollout(step, show)

    def finish_generation(self) -> dict[str, float]:
        return self._engines.finish_generation()

    def settle(self, show: Show) -> None: ...

    def publish(self, step: int) -> dict[str, float]:
        return self._engines.refit(step)

    def held_out(self, step: int, show: Show) -> Rollout:
        return self._sampler.held_out(step, show)

    def save(self, folder: Path) -> Mapping[str, Any]:
        return self._sampler.order.state()

    def close(self) -> None: ...
