"""Protocol of environments, which answer the assistant's turns until they or the limit on turns end the episode."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem


@dataclass(frozen=True)
class Observation:
    """An environment's answer to an assistant turn.

    An episode's reward is the sum of `reward` over its turns; if no turn has one, the configured reward judges the
    last turn. The assistant reads `messages` before its next turn; they may be empty only with `done`.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """One is made for each episode, with `environment.kwargs`, so it may keep the episode's state. Optional members,
    plain or `async def`:

    - `tools`, an attribute: functions in OpenAI's format, the same for all episodes, which every prompt offers.
      `ToolEnvironment` is a base class for those.
    - `check()`, always plain, is called once before a run starts anything, and raises an error if something is wrong.
    - `cut_short(problem, conversation)` gives the reward, or None, of an episode that ends for lack of turns or room.
    - `close()` is called after the episode.
    """

    def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation | Awaitable[Observation]:
        """Answer `conversation`: the problem's messages and all later ones, the last of them the assistant's. With
        `async def`, many steps share a thread; otherwise each has its own. The last message's `tool_calls`, if there
        are any, are as `data.tools.checked_calls` describes them; its content is all that was written, with them."""
        ...
