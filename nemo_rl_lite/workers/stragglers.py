"""Finds data-parallel replicas that are slow for their work, step after step."""

import logging
from collections.abc import Callable, Sequence
from statistics import median

log = logging.getLogger(__name__)

# A replica is a straggler if its time for equal work exceeds the median of the others by this factor, in this number of
# consecutive steps.
RATIO, STEPS = 1.2, 5


class Stragglers:
    """Compares the replicas' times for equal work, and warns once of each straggler."""

    def __init__(self, describe: Callable[[int], str]):
        """`describe` returns a replica's ranks, host and GPUs."""
        self._describe = describe
        self._slow_steps: dict[int, int] = {}

    def note(self, seconds: Sequence[float], work: Sequence[float]) -> float:
        """Count a step. `seconds` and `work` (in any unit): of each replica's passes, without waits for others.

        Returns the time of the slowest replica for equal work, divided by the median of the others.
        """
        each = [own / done for own, done in zip(seconds, work, strict=True)]
        ratios = [one / median([*each[:place], *each[place + 1 :]]) for place, one in enumerate(each)]
        for replica, ratio in enumerate(ratios):
            self._slow_steps[replica] = self._slow_steps.get(replica, 0) + 1 if ratio >= RATIO else 0
            if self._slow_steps[replica] == STEPS:
                log.warning(
                    "straggler: %s took %.0f %% longer than the median of the other replicas for equal work, in %d "
                    "consecutive steps; check this GPU's clock, temperature and errors, and the load of its host",
                    self._describe(replica),
                    100 * (ratio - 1),
                    STEPS,
                )
        return max(ratios)
