"""Play episodes of one turn, or of several with an environment; see `agents.py` for agents."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.registry import Environments
from nemo_rl_lite.generation.interface import Progress, Request, Requests, Sampling
from nemo_rl_lite.rewards.registry import RewardError, checked_reward
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.segments import Segment, Start
from nemo_rl_lite.system.user_errors import as_call_error

Section = Literal["environment", "agent"]
"""Section of the configuration with the user code of episodes."""


@dataclass
class Assistant:
    """The policy in one episode. `seeds` and the numbers of segment and turn determine the seed of a response."""

    episode: Episode
    requests: Requests
    tokenizer: ChatTokenizer
    sampling: Sampling
    seeds: tuple[int, ...]
    max_length: int
    step: int = 0
    """Step that waits for the response."""
    continues: bool = False
    """See `Request.continues`."""

    @property
    def room(self) -> int:
        """Maximum number of tokens before a response of full length."""
        return self.max_length - self.sampling.max_new_tokens

    async def respond(
        self,
        tokens: Sequence[int] = (),
        messages: Sequence[Message] = (),
        sampling: Sampling | None = None,
        segment: Segment | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Add `messages`, tokenized as `tokens`, and the policy's response to a segment, by default the first.
        `progress` receives the tokens so far. Raises EngineError, WorkerError: there is no response (see
        `RequestQueue.sample`); the segment is unchanged."""
        episode, segment = self.episode, segment or self.episode
        history = segment.history
        place = (history.number, len(segment.turns)) if history.number else (len(segment.turns),)
        digest = hashlib.blake2b(repr((*self.seeds, *place)).encode(), digest_size=4).digest()
        seed = int.from_bytes(digest) >> 1
        prompt, continued = (*segment.tokens, *tokens), {"continues": self.continues, "begun": history.begun}
        request = Request(prompt, sampling or self.sampling, seed, self.step, streams=progress is not None, **continued)
        history.is_busy = True
        try:
            with episode.waiting("generate") as span:
                completion, span.place = await self.requests.sample(request, history.conversation, progress)
        finally:
            history.is_busy, history.begun = False, None
        segment.add_messages(tokens, messages)
        episode.add_turn(completion, self.tokenizer.text(completion.tokens), segment)

    async def answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        start: Start,
        tokens: Sequence[int],
        sampling: Sampling | None = None,
        progress: Progress | None = None,
    ) -> Segment:
        """Respond to an agent's messages, which have the tokens of `start` and then `tokens`. Return the segment whose
        last turn is the response; see `Segment.note`. Requests may run at the same time. Raises what `respond`
        raises."""
        segment = self.episode.open(start, tokens, messages, tools)
        new = (tokens, messages[start.messages :]) if segment is start.segment else ((), ())
        await self.respond(*new, sampling, segment, progress)
        return segment


class EpisodeRunner(Protocol):
    """Plays episodes."""

    section: ClassVar[Section]

    @property
    def resumes(self) -> bool:
        """True if `play` continues an episode that has turns or tokens of its next turn."""
        ...

    async def play(self, episode: Episode, assistant: Assistant) -> None:
        """Play the episode to its end. Without a reward, the configured reward function scores it.

        Raises:
            CallError: user code failed; only this episode is lost.
            DataError: the run's data or code cannot be used.
        """
        ...


class SingleTurn:
    """One response to the prompt."""

    section: ClassVar[Section] = "environment"
    resumes = True

    async def play(self, episode: Episode, assistant: Assistant) -> None:
        """See `EpisodeRunner.play`."""
        episode.end()
        await assistant.respond()


# Roles of an environment's messages.
_ROLES = ("user", "tool", "system")


@dataclass(frozen=True)
class Turns:
    """Plays up to `max_turns` turns per episode, with an environment's answers between them."""

    environments: Environments
    max_turns: int
    saves: bool = False
    """True if checkpoints need the environments' snapshots."""
    _sessions: Iterator[int] = field(default_factory=itertools.count, init=False)
    section: ClassVar[Section] = "environment"

    @property
    def resumes(self) -> bool:
        return self.environments.resumption is not None

    async def play(self, episode: Episode, assistant: Assistant) -> None:
        """See `EpisodeRunner.play`. Raises DataError if the chat template cannot render the environment's answer."""
        session = next(self._sessions)
        try:
            if episode.turn_rewards:
                with episode.waiting("environment"):
                    await self._restore(session, episode)
            continues = True
            while continues:
                # The last message of a resumed episode may be a response that the environment has not answered.
                if not episode.said or episode.said[-1]["role"] != "assistant":
                    await assistant.respond()
                with episode.waiting("environment"):
                    continues = await self.continues(episode, session, assistant.tokenizer, assistant.room)
        finally:
            await self.environments.close(session)

    async def _restore(self, session: int, episode: Episode) -> None:
        """Bring a new environment to the state after the last answered turn. Raises what `continues` raises."""
        if self.environments.resumption == "snapshot":
            await self.environments.restore(session, episode.state)
            return
        ends = [place for place, message in enumerate(episode.said, 1) if message["role"] == "assistant"]
        for end in ends[: len(episode.turn_rewards)]:
            conversation = [*episode.problem.messages, *episode.said[:end]]
            await self.environments.step(session, episode.problem, conversation)

    async def continues(self, episode: Episode, session: int, tokenizer: ChatTokenizer, room: int) -> bool:
        """Add the last turn's tool calls to its message, and the environment's answer to the episode. Return whether
        another turn follows, which must begin within `room` tokens.

        Raises:
            CallError: the environment raises, exceeds its time limit, or gives an invalid answer.
            DataError: the chat template cannot render the answer.
        """
        if tools := episode.problem.tools:
            calls = tokenizer.tool_calls(episode.turns[-1][1].tokens, tools, len(episode.turns))
            episode.said[-1] |= {"tool_calls": calls} if calls else {}
        conversation = [*episode.problem.messages, *episode.said]
        observation = await self.environments.step(session, episode.problem, conversation)
        try:
            _check(observation)
            episode.note_metrics("step()", observation.metrics)
        except (TypeError, ValueError, RewardError) as error:
            raise as_call_error(error) from error
        if observation.done:
            _add_rewards(episode, observation.reward)
            return False
        ending = episode.ending
        if ending != "length" and len(episode.turns) == self.max_turns:
            ending = "turns"
        elif ending != "length":
            tokens = tokenizer.between_turns(observation.messages, episode.tokens[-1])
            if len(episode.tokens) + len(tokens) <= room:
                state = await self.environments.state(session) if self.saves else None
                # A checkpoint has all changes of a turn, or none.
                episode.state = state
                episode.add_messages(tokens, observation.messages)
                _add_rewards(episode, observation.reward)
                return True
            ending = "length"
        reward = await self.environments.cut_short(session, episode.problem, conversation)
        try:
            last = None if reward is None else checked_reward("cut_short()", reward)
        except RewardError as error:
            raise as_call_error(error) from error
        episode.ending = ending
        _add_rewards(episode, observation.reward, last)
        return False


def _add_rewards(episode: Episode, *rewards: float | None) -> None:
    """Add the rewards of a turn."""
    given = [reward for reward in rewards if reward is not None]
    episode.turn_rewards.append(sum(given, 0.0))
    if given:
        episode.reward = sum(given, episode.reward or 0.0)


def _check(observation: Observation) -> None:
    if not isinstance(observation, Observation):
        raise TypeError(f"step() returned {type(observation).__name__}, not an Observation")
    if not isinstance(observation.done, bool):
        raise TypeError(f"step() returned done={observation.done!r}, not a bool")
    if not observation.done and not observation.messages:
        raise ValueError("step() returned no message, although the episode is not done")
    for message in observation.messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f"step() returned {message!r:.80}; a message is a dict with a role of {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), str):
            raise TypeError(f"step() returned a message whose content is not text: {message!r:.80}")
        # Raises ValueError for half of a surrogate pair, which a model may generate.
        message["content"].encode()
    if observation.reward is not None:
        checked_reward("step()", observation.reward)
