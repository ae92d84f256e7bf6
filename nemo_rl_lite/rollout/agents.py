"""Play episodes with an agent that uses the endpoint. Tokens of earlier turns are never tokenized again."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from nemo_rl_lite.data.messages import Message, read_messages
from nemo_rl_lite.environments import agents as interface
from nemo_rl_lite.environments.agents import Agents
from nemo_rl_lite.errors import DataError, EngineError, WorkerError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.rewards.registry import RewardError, checked_reward
from nemo_rl_lite.rollout.episode import Episode, Span
from nemo_rl_lite.rollout.play import Assistant, Section
from nemo_rl_lite.rollout.segments import Start
from nemo_rl_lite.serving.protocol import (
    FULL,
    Answer,
    ApiRequest,
    ChatRequest,
    ChoiceProgress,
    RefusedError,
    Reply,
    tokenized,
)
from nemo_rl_lite.serving.public import all_or, limited
from nemo_rl_lite.serving.server import Endpoint
from nemo_rl_lite.system.user_errors import CallError, as_call_error

# Sampling parameters and their values in the APIs if a request has none. Many agents send these.
_DEFAULTS = {"temperature": 1, "top_p": 1, "top_k": None, "min_p": 0}


@dataclass(frozen=True)
class AgentPlay:
    """`EpisodeRunner` of a user's agent, which asks the endpoint for responses. In a validation, requests may also name
    the sampling of `training`."""

    agents: Agents
    endpoint: Endpoint
    training: Sampling
    section: ClassVar[Section] = "agent"
    # The user's program has its own state.
    resumes = False

    async def play(self, episode: Episode, assistant: Assistant) -> None:
        """See `EpisodeRunner.play`. An agent that fails because the conversation is too long truncates the episode."""
        session = _AgentSession(episode, assistant, self.training)
        try:
            async with self.endpoint.gate.session(session) as key:
                own = interface.Endpoint(self.endpoint.url, key, self.endpoint.model)
                playing = asyncio.ensure_future(self.agents.play(episode.problem, own))
                try:
                    await asyncio.wait({playing, session.failed}, return_when=asyncio.FIRST_COMPLETED)
                    answer = session.failed.result() if session.failed.done() else playing.result()
                finally:
                    playing.cancel()
                    session.failed.cancel()
        except CallError:
            if not session.is_full:
                raise
            episode.ending, answer = "length", None
        finally:
            session.waited()
        if not episode.turn_count:
            raise CallError("the agent asked the endpoint for no response")
        try:
            if isinstance(answer, interface.Outcome):
                episode.note_metrics("the agent", answer.metrics)
                answer = answer.reward
            if answer is not None:
                _note_reward(episode, answer)
        except (RewardError, ValueError) as error:
            raise as_call_error(error) from error


def _note_reward(episode: Episode, reward: Any) -> None:
    """Give an episode what its agent returned. Raises RewardError or ValueError: it is invalid."""
    if not isinstance(reward, list | tuple):
        episode.reward = checked_reward("the agent", reward)
        return
    if len(reward) != episode.turn_count:
        raise ValueError(f"the agent returned {len(reward)} rewards for {episode.turn_count} responses")
    episode.turn_rewards = [checked_reward("the agent", one) for one in reward]
    episode.reward = sum(episode.turn_rewards)


class _AgentSession:
    """`CompletionHandler` of one episode. A request continues a segment of the episode, or begins another one. Each
    further choice begins one, too."""

    def __init__(self, episode: Episode, assistant: Assistant, training: Sampling):
        self._episode, self._assistant, self._training = episode, assistant, training
        self._in_flight = 0
        self._waits()
        # Whether the last request was too long.
        self.is_full = False
        # Set if the engines fail: the run's error, not the agent's.
        self.failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def respond(self, asked: ApiRequest, progress: ChoiceProgress | None = None) -> Answer:
        """See `CompletionHandler.respond`."""
        try:
            return await self._respond(asked, progress)
        except RefusedError as refused:
            self._episode.refused.append(str(refused))
            self.is_full = refused.code == FULL and self._episode.turn_count > 0
            raise

    async def _respond(self, asked: ApiRequest, progress: ChoiceProgress | None) -> Answer:
        if not isinstance(asked, ChatRequest):
            raise RefusedError(400, "an agent's episode is a chat: use /chat/completions instead of /completions")
        # A request that runs at the same time may find that it is too long.
        self.is_full = False
        episode, assistant = self._episode, self._assistant
        tokenizer, sampling = assistant.tokenizer, self._sampling(asked)
        messages, tools = asked.chat(), asked.offered
        repeated = list(map(_compared, messages))
        start = episode.start_of(repeated, tools)
        tokens: Sequence[int] = ()
        if start.segment is not None:
            work = partial(tokenizer.continuation, messages, start.messages, start.tokens[-1], tools)
            try:
                tokens = await tokenized(asked, work, tokenizer, assistant.max_length)
            except DataError:
                # The template renders these messages only as a whole.
                start = Start()
        if start.segment is None:
            (tokens,) = await tokenized(asked, lambda: asked.prompts(tokenizer), tokenizer, assistant.max_length)
        prompt = (*start.tokens, *tokens)
        sampling = limited(sampling, asked, len(prompt), assistant.max_length)
        shown = (None if progress is None else partial(progress, index) for index in range(asked.n or 1))
        with self._answering():
            # The first choice may continue a segment. Meanwhile that is busy, so each other one begins a segment.
            answers = (assistant.answer(messages, tools, start, tokens, sampling, one) for one in shown)
            segments = await asyncio.gather(*answers)
        episode.sort_last_turns(segments)
        completions = tuple(one.turns[-1][1] for one in segments)
        replies = tuple(asked.reply(one, tokenizer) for one in completions)
        for segment, reply in zip(segments, replies, strict=True):
            segment.said[-1] |= {"tool_calls": list(reply.calls)} if reply.calls else {}
            segment.note([*repeated, _compared(_answered(reply))])
        return Answer((prompt,), completions, replies)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Note that the episode waits for the engines, and no longer for the agent."""
        self.waited()
        self._in_flight += 1
        try:
            yield
        except (EngineError, WorkerError) as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._waits()

    def waited(self) -> None:
        """Note that the episode no longer waits for the agent."""
        if self._episode.waits_for == "environment":
            self._episode.spans[-1].end = time.perf_counter()

    def _waits(self) -> None:
        self._episode.spans.append(Span("environment", time.perf_counter()))

    def _sampling(self, asked: ChatRequest) -> Sampling:
        """Return the episode's sampling. Raises RefusedError: the request asks for another."""
        own, training = self._assistant.sampling, self._training
        for name in _DEFAULTS:
            value = getattr(asked, name)
            # vLLM writes no limit as 0 or -1.
            value = all_or(value) if name == "top_k" and value is not None else value
            if value not in (None, _DEFAULTS[name], getattr(training, name), getattr(own, name)):
                rule = f"training samples with generation.{name} = {getattr(training, name)}, which the loss relies on"
                raise RefusedError(400, f"{name} = {value}: {rule}; leave it out, or set that key", name)
        if asked.stop:
            raise RefusedError(400, "stop: set generation.stop_strings, which holds for all responses", "stop")
        if changed := asked.options().changed():
            rule = "training samples from the policy's own distribution, and keeps only the sampled token's logprob"
            raise RefusedError(400, f"{', '.join(changed)}: {rule}; leave it out", changed[0])
        if asked.seed is not None:
            rule = "seed: seeds follow from algorithm.seed, the step and the episode; leave it out"
            raise RefusedError(400, rule, "seed")
        return own


def _answered(reply: Reply) -> Message:
    """Return a response as a message, in the form in which requests repeat it."""
    calls = {"tool_calls": reply.calls} if reply.calls else {}
    (message,) = read_messages([{"role": "assistant", "content": reply.text, **calls}], "the response")
    return message


def _compared(message: Message) -> Message:
    """Return the part of a message that must not change. Frameworks trim assistant messages and drop their reasoning.
    The episode has the sampled tokens in any case."""
    if message["role"] != "assistant":
        return message
    content = message["content"].rpartition("</think>")[2].strip()
    return {"role": "assistant", "content": content, "tool_calls": message.get("tool_calls", [])}
