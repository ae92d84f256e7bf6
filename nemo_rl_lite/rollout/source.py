"""Source of the loop's rollouts, which also refits the engines; see `queue.py` for asynchronous rollouts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.rollout.collector import Show
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.sampler import Sampler


class RolloutSource(Protocol):
    """In each step the loop takes a rollout, trains on it, waits until the engines may be refitted, and publishes the
    new weights."""

    def take(self, step: int, show: Show) -> Rollout:
        """Return the rollout of a step; `show` gets its progress."""
        ...

    def take_again(self, step: int, show: Show) -> Rollout:
        """Return the last rollout with new episodes for those that have died with a rollout worker. The policy still
        has the weights of the last `publish`."""
        ...

    def finish_generation(self) -> dict[str, float]:
        """Free the devices that engines share with the policy; return metrics of the engines' memory."""
        ...

    def wait_until_idle(self, show: Show) -> None:
        """Wait until the engines may be refitted."""
        ...

    def publish(self, step: int) -> dict[str, float]:
        """Refit the engines with this step's weights; return metrics."""
        ...

    def held_out(self, step: int, show: Show) -> Rollout:
        """Sample the held-out problems with the engines' current weights."""
        ...

    def save(self, folder: Path) -> Mapping[str, Any]:
        """Return the state for a checkpoint, and write its large parts to the folder."""
        ...

    def close(self) -> None:
        """End all work. Called however the run ends."""
        ...


class Engines(Protocol):
    """Engines as a source controls them."""

    def refit(self, version: int) -> dict[str, float]:
        """Wait until enough engines live, and refit all with a step's weights; return metrics."""
        ...

    def admit(self) -> None:
        """Add engines that have started, with the weights of the last refit. The policy must be idle and have these."""
        ...

    def finish_generation(self) -> dict[str, float]:
        """See `Generation.finish_generation`."""
        ...


class OnPolicy:
    """Samples each rollout with the weights that train on it."""

    def __init__(self, sampler: Sampler, engines: Engines):
        self._sampler, self._engines = sampler, engines

    def take(self, step: int, show: Show) -> Rollout:
        return self._sampler.rollout(step, self._admitting(show))

    def take_again(self, step: int, show: Show) -> Rollout:
        # The engines may have released their weights.
        self._engines.refit(step - 1)
        return self._sampler.again(step, self._admitting(show))

    def finish_generation(self) -> dict[str, float]:
        return self._engines.finish_generation()

    def wait_until_idle(self, show: Show) -> None: ...

    def publish(self, step: int) -> dict[str, float]:
        return self._engines.refit(step)

    def held_out(self, step: int, show: Show) -> Rollout:
        return self._sampler.held_out(step, self._admitting(show))

    def save(self, folder: Path) -> Mapping[str, Any]:
        return self._sampler.state()

    def close(self) -> None: ...

    def _admitting(self, show: Show) -> Show:
        """Let engines join the rollout whose progress `show` gets."""

        def look(progress: str) -> None:
            self._engines.admit()
            show(progress)

        return look
