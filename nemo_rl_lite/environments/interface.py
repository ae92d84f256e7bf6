"""What an environment is: it answers the assistant's turns, until it or the number of turns ends the episode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_lite.data.problems import Message, Problem


@dataclass(frozen=True)
class Observation:
    """What an environment says to a turn of the assistant's.

    An episode's reward is the sum of `reward` over its turns; where none of them has one, the configured reward judges
    the last turn. `messages` is what the assistant reads before its next turn; only with `done` may there be none.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """Made once a run, with `environment.kwargs`. It keeps nothing of an episode: the conversation tells it all."""

    def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """The answer to `conversation`: the problem's messages and those since, the assistant's last."""
        ...
