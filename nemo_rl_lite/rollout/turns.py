"""How an environment continues an episode between two turns of the assistant."""

from dataclasses import dataclass

from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.sessions import Environments
from nemo_rl_lite.host.calls import as_call_error
from nemo_rl_lite.rewards.value import RewardError, checked_reward
from nemo_rl_lite.rollout.episode import Episode

# What an environment may be in the chat; the assistant's turns are sampled.
_ROLES = ("user", "tool", "system")


@dataclass(frozen=True)
class Turns:
    """The environments of a run, and the largest number of turns in an episode."""

    environments: Environments
    max_turns: int

    async def continues(self, episode: Episode, session: int, tokenizer: ChatTokenizer, room: int) -> bool:
        """Let the environment answer the last turn. Returns whether another turn follows, for which the episode is then
        ready; that turn has to begin within `room` tokens.

        Raises:
            CallError: the environment raises, is late, or answers with something unusable.
            DataError: the chat template cannot write its answer.
        """
        conversation = [*episode.problem.messages, *episode.said]
        observation = await self.environments.step(session, episode.problem, conversation)
        try:
            _check(observation)
        except (TypeError, ValueError, RewardError) as error:
            raise as_call_error(error) from error
        if observation.reward is not None:
            episode.reward = (episode.reward or 0.0) + observation.reward
        if observation.done or episode.ending == "length":
            return False
        if len(episode.turns) == self.max_turns:
            episode.ending = "turns"
            return False
        tokens = tokenizer.between_turns(observation.messages, episode.tokens[-1])
        if len(episode.tokens) + len(tokens) > room:
            episode.ending = "length"
            return False
        episode.add_messages(tokens, observation.messages)
        return True


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
    if observation.reward is not None:
        checked_reward("step()", observation.reward)
