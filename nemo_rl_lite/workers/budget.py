"""The budget of restarts after lost processes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_rl_lite.errors import WorkerError


@dataclass
class RestartBudget:
    """Restarts in a row that a run may take without a new step. Policy, engines and rollout workers share them.

    A run that makes progress never uses them up. A run that fails at the same step each time ends.
    """

    most: int
    step: Callable[[], int]
    """Returns the number of the step in progress."""
    taken: int = field(default=0, init=False)
    """Restarts since the last new step."""
    _furthest: int = field(default=-1, init=False)

    def take(self, error: WorkerError) -> str:
        """Count a restart after `error`; return the count as a phrase. Raises `error` if no restart is left."""
        if (step := self.step()) > self._furthest:
            self._furthest, self.taken = step, 0
        if self.taken >= self.most:
            raise error
        self.taken += 1
        return f"restart {self.taken} of at most {self.most} without a new step, cluster.max_restarts"
