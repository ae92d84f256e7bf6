"""How an environment continues an episode between two turns of the assistant."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.sessions import Environments
from nemo_rl_lite.host.pool import as_call_error
from nemo_rl_lite.rewards.value import RewardError, checked_reward
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.playing import Assistant, Section

# What an environment may be in the chat; the assistant's turns are sampled.
_ROLES = ("user", "tool", "system")


@dataclass(frozen=True)
class Turns:
    """Plays episodes of up to `max_turns` turns, between which an environment answers."""

    environments: Environments
    max_turns: int
    _sessions: Iterator[int] = field(default_factory=itertools.count, init=False)
    section: ClassVar[Section] = "environment"

    async def play(self, episode: Episode, assistant: Assistant) -> None:
        """See `Play.play`. Raises DataError also where the chat template cannot write the environment's answer."""
        session = next(self._sessions)
        try:
            await assistant.respond()
            while await self._answered(episode, session, assistant):
                await assistant.respond()
        finally:
            await self.environments.close(session)

    async def _answered(self, episode: Episode, session: int, assistant: Assistant) -> bool:
        with episode.waiting("environment"):
            return await self.continues(episode, session, assistant.tokenizer, assistant.room)

    async def continues(self, episode: Episode, session: int, tokenizer: ChatTokenizer, room: int) -> bool:
        """Let the environment answer the last turn, whose message gets its tool calls first. Returns whether another
        turn follows, for which the episode is then ready; that turn has to begin within `room` tokens.

        Raises:
            CallError: the environment raises, is late, or answers with something unusable.
            DataError: the chat template cannot write its answer.
        """
        if tools := episode.problem.tools:
            calls = tokenizer.tool_calls(episode.turns[-1][1].tokens, tools, len(episode.turns))
            episode.said[-1] |= {"tool_calls": calls} if calls else {}
        conversation = [*episode.problem.messages, *episode.said]
        observation = await self.environments.step(session, episode.problem, conversation)
        try:
            _check(observation)
        except (TypeError, ValueError, RewardError) as error:
            raise as_call_error(error) from error
        _add(observation.reward, episode)
        if observation.done:
            return False
        if episode.ending != "length" and len(episode.turns) == self.max_turns:
            episode.ending = "turns"
        elif episode.ending != "length":
            tokens = tokenizer.between_turns(observation.messages, episode.tokens[-1])
            if len(episode.tokens) + len(tokens) <= room:
                episode.add_messages(tokens, observation.messages)
                return True
            episode.ending = "length"
        reward = await self.environments.cut_short(session, episode.problem, conversation)
        try:
            _add(None if reward is None else checked_reward("cut_short()", reward), episode)
        except RewardError as error:
            raise as_call_error(error) from error
        return False


def _add(reward: float | None, episode: Episode) -> None:
    if reward is not None:
        episode.reward = (episode.reward or 0.0) + reward


def _check(observation: Observation) -> None:
    if not isinstance(observation, Observation):
        raise TypeError(f"step() returned {type(observation).__name__}, not an Observation")
    if not isinstance(observation.done, bool):
        raise TypeError(f"step() returned done={observation.done!r}, which is no bool")
    if not observation.done and not observation.messages:
        raise ValueError("step() returned no message, although the episode is not done")
    for message in observation.messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f"step() returned {message!r:.80}; a message is a dict with a role of {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), str):
            raise TypeError(f"step() returned a message whose content is no text: {message!r:.80}")
        # Half of a character that takes two, which a model may write, is no text either. This raises a ValueError.
        message["content"].encode()
    if observation.reward is not None:
        checked_reward("step()", observation.reward)
