"""Which prompts a rollout has: all that were asked for, or only those that teach something."""

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.losses.advantages import differ
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.rollout import Rollout

# At most eight times the missing prompts are under way, even if almost none is useful.
_LEAST_SHARE = 1 / 8


@dataclass(eq=False)
class Group:
    """The samples of one prompt."""

    episodes: list[Episode]
    played: asyncio.Future
    _useful: bool | None = field(default=None, init=False)

    @property
    def is_done(self) -> bool:
        # An aborted one ends with CancelledError.
        return self.played.done() and not self.played.cancelled() and self.played.exception() is None

    @property
    def is_useful(self) -> bool:
        """Whether it is done and its rewards differ."""
        if self._useful is None and self.is_done:
            self._useful = differ([math.nan if one.reward is None else one.reward for one in self.episodes])
        return bool(self._useful)


@dataclass(frozen=True)
class Wanted:
    """The prompts that a rollout shall have: `count` of them, with `samples` episodes each.

    Where they shall be `useful`, those whose rewards are all the same are replaced by the next ones of `problem`.
    `oversample` times `count`, without those that are useful already, are under way; by default as many as it probably
    takes: `share` is the share of useful ones that is expected before prompts of this rollout have ended. What is kept
    are the first `count` useful ones in the order of `problem`. Neither the lengths of responses nor time choose, nor
    how many are under way. At most `most` are sampled; then those that are not useful fill the rollout.
    """

    problem: Callable[[int], Problem]
    count: int
    samples: int
    useful: bool = False
    oversample: float | None = None
    share: float = 1.0
    most: int = sys.maxsize

    def missing(self, groups: Sequence[Group]) -> int:
        """How many more prompts to begin."""
        if not self.useful:
            return self.count - len(groups)
        if self._kept(groups) is not None:
            return 0
        useful, ended = sum(group.is_useful for group in groups), sum(group.is_done for group in groups)
        under_way = len(groups) - ended
        return max(min(self._at_a_time(useful, ended) - under_way, self.most - len(groups)), 0)

    def is_settled(self, groups: Sequence[Group]) -> bool:
        """Whether what is done decides what is kept."""
        return self._kept(groups) is not None

    def rollout(self, groups: Sequence[Group], reward_errors: int, environment_errors: int) -> Rollout:
        """Put together what is kept. The failures are those of all groups."""
        kept = self._kept(groups) or []
        last = max(groups.index(group) for group in kept)
        dropped = [group for group in groups if group not in kept]
        return Rollout(
            [episode for group in kept for episode in group.episodes],
            self.samples,
            reward_errors,
            environment_errors,
            tuple(group.is_useful for group in groups[: last + 1]),
            dropped=tuple(episode for group in dropped for episode in group.episodes),
        )

    def _at_a_time(self, useful: int, ended: int) -> int:
        """How many prompts shall be under way, given how many have ended and how many of these are useful."""
        if self.oversample is not None:
            return math.ceil(self.count * self.oversample) - useful
        # What was expected counts like `count` prompts of this rollout.
        share = (self.share * self.count + useful) / (self.count + ended)
        return math.ceil((self.count - useful) / max(share, _LEAST_SHARE))

    def _kept(self, groups: Sequence[Group]) -> list[Group] | None:
        """The groups to keep, in the order of the data; None while that is open."""
        kept, others = list[Group](), list[Group]()
        for group in groups:
            if not group.is_done:
                return None
            (kept if group.is_useful or not self.useful else others).append(group)
            if len(kept) == self.count:
                return kept
        if len(groups) < self.most:
            return None
        filled = [*kept, *others[: self.count - len(kept)]]
        return [group for group in groups if group in filled]
