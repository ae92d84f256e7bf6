"""Episodes whose reward, environment or agent failed: the first of a rollout is logged, and too many end the run."""

import logging
from dataclasses import dataclass, field

from nemo_rl_lite.errors import DataError
from nemo_rl_lite.host.pool import CallError
from nemo_rl_lite.rewards.value import RewardError
from nemo_rl_lite.rollout.episode import Episode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ErrorShares:
    """The largest shares of a rollout's episodes whose reward, and whose environment or agent, may fail."""

    reward: float
    environment: float


@dataclass
class Failures:
    """Errors of one kind in a rollout: the first is logged, all are counted."""

    what: str
    key: str
    limit: float
    errors: list[Exception] = field(default_factory=list)
    _failed: set[int] = field(default_factory=set)

    def add(self, error: Exception, episode: Episode) -> None:
        """The error is that of the episode."""
        self.errors.append(error)
        self._failed.add(id(episode))
        if len(self.errors) == 1:
            log.warning("%s failed on %s: %s", self.what, shown(episode), error)
            if isinstance(error, CallError | RewardError) and error.details:
                log.info("%s", error.details)

    def has(self, episode: Episode) -> bool:
        """Whether the episode has failed."""
        return id(episode) in self._failed

    def check(self, failed: int, episodes: int) -> None:
        """Raise DataError where too many of this number of episodes have failed."""
        if failed > self.limit * episodes:
            first = f"; first with {self.errors[0]}" if self.errors else ""
            raise DataError(
                f"{self.what} failed on {failed} of {episodes} samples, and at most the share "
                f"{self.key} = {self.limit:g} may fail{first}"
            )


def shown(episode: Episode) -> str:
    """The end of an episode's response, and the answer, for messages."""
    return f"{episode.response[-200:]!r} (answer {episode.problem.answer!r})"
