"""An environment answers the assistant's turns, until it or the limit on turns ends the episode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_lite.data.problems import Message, Problem


@dataclass(frozen=True)
class Observation:
    """An environment's answer to an assistant turn.

    An episode's reward is the sum of `reward` over its turns; where no turn has one, the configured reward judges
    the last turn. The assistant reads `messages` before its next turn; they may be empty only with `done`.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """The run makes one environment, with `environment.kwargs`. It keeps no state of an episode: the conversation
    holds all of it."""

    def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """Answer `conversation`: the problem's messages and all later ones, the last of them the assistant's."""
        ...
