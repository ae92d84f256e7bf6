"""Protocol of environments, which answer assistant turns until the episode ends."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem


@dataclass(frozen=True)
class Observation:
    """An environment's answer to an assistant turn.

    An episode's reward is the sum of `reward` over its turns. Without any, the configured reward function scores the
    last turn. `messages` precede the next assistant turn; they may be empty only if `done`. `metrics` are numbers of
    the episode by name, and replace those of earlier turns with the same name.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """An object per episode, created with `environment.kwargs`, so it may keep state. Optional members, plain or
    `async def`:

    - `tools`, an attribute: functions in OpenAI's format that every prompt offers, the same for all episodes.
      `ToolEnvironment` is a base class for such environments.
    - `check()`, always plain, is called once before the run starts. It raises an error if something is wrong.
    - `cut_short(problem, conversation)` returns the reward, or None, of an episode that runs out of turns or length.
    - `close()` is called after the episode.
    - `state()` returns what a new object needs to continue the episode, as JSON or bytes, and `restore(state)` takes it
      over. A resumed run then continues unfinished episodes of a checkpoint.
    - `deterministic = True`, instead of both: a new object that gets the same calls of `step` is in the same state.
    """

    def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation | Awaitable[Observation]:
        """Answer `conversation`: all messages of the episode, the last one by the assistant. Steps of an `async def`
        method share a thread; otherwise each has its own thread. For `tool_calls` of the last message see
        `data.tools.checked_calls`; its content is the whole text, calls included."""
        ...
