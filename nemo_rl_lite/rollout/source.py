"""Give the loop its rollouts, and the engines new weights; see `queue.py` for asynchronous rollouts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.rollout.collector import Show
from nemo_rl_lite.rollout.episode import Rollout
from nemo_rl_lite.rollout.sampler import Sampler


class RolloutSource(Protocol):
    """In each step the loop takes a rollout, trains on it, waits until the engines may have new weights, and publishes
    them."""

    def take(self, step: int, show: Show) -> Rollout:
        """Return the rollout of a step; `show` is told how far it is."""
        ...

    def finish_generation(self) -> dict[str, float]:
        """Leave the devices that engines share with the policy; returns metrics of the engines' memory."""
        ...

    def wait_until_idle(self, show: Show) -> None:
        """Wait until the engines may have new weights."""
        ...

    def publish(self, step: int) -> dict[str, float]:
        """Refit the engines with this step's weights; returns metrics."""
        ...

    def held_out(self, step: int, show: Show) -> Rollout:
        """Sample the held-out problems with the engines' present weights."""
        ...

    def save(self, folder: Path) -> Mapping[str, Any]:
        """Return the state for a checkpoint; large parts are written to the folder."""
        ...

    def close(self) -> None:
        """End all work, however the run ends."""
        ...


class Engines(Protocol):
    """Engines, as a source steers them."""

    def refit(self, version: int) -> dict[str, float]:
        """Restart engines that have died, and refit all with a step's weights; returns metrics."""
        ...

    def finish_generation(self) -> dict[str, float]:
        """See `Generation.finish_generation`."""
        ...


class OnPolicy:
    """Samples each rollout by the weights that it trains."""

    def __init__(self, sampler: Sampler, engines: Engines):
        self._sampler, self._engines = sampler, engines

    def take(self, step: int, show: Show) -> Rollout:
        return self._sampler.rollout(step, show)

    def finish_generation(self) -> dict[str, float]:
        return self._engines.finish_generation()

    def wait_until_idle(self, show: Show) -> None: ...

    def publish(self, step: int) -> dict[str, float]:
        return self._engines.refit(step)

    def held_out(self, step: int, show: Show) -> Rollout:
        return self._sampler.held_out(step, show)

    def save(self, folder: Path) -> Mapping[str, Any]:
        return self._sampler.state()

    def close(self) -> None: ...
