"""An environment answers the assistant's turns, until it or the limit on turns ends the episode."""

from collections.abc import Awaitable, Sequence
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
    """One is made for each episode, with `environment.kwargs`, so it may keep the episode's state in itself. It may
    have a method `close()`, which is called when the episode is over."""

    def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation | Awaitable[Observation]:
        """Answer `conversation`: the problem's messages and all later ones, the last of them the assistant's. With
        `async def`, many steps share a thread; otherwise each has its own."""
        ...
