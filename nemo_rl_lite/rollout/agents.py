"""Play episodes with an agent that uses the endpoint. Tokens of earlier turns are never tokenized again."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.environments import agents as interface
from nemo_rl_lite.environments.agents import Agents
from nemo_rl_lite.errors import DataError, EngineError, WorkerError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.rewards.registry import RewardError, checked_reward
from nemo_rl_lite.rollout.episode import Episode, Span
from nemo_rl_lite.rollout.play import Assistant, Section
from nemo_rl_lite.serving.protocol import FULL, Answer, ApiRequest, ChatRequest, ChoiceProgress, RefusedError, tokenized
from nemo_rl_lite.serving.public import limited
from nemo_rl_lite.serving.server import Endpoint
from nemo_rl_lite.system.user_errors import CallError, as_call_error


@dataclass(frozen=True)
class AgentPlay:
    """`EpisodeRunner` of a user's agent, which asks the endpoint for responses. In a validation, requests may also name
    the sampling of `training`."""

    agents: Agents
    endpoint: Endpoint
    training: Sampling
    section: ClassVar[Section] = "agent"

    async def play(self, episode: Episode, assistant: Assistant) -> None:
        """See `EpisodeRunner.play`. An agent that fails because the conversation is too long truncates the episode."""
        session = _AgentSession(episode, assistant, self.training)
        try:
            async with self.endpoint.gate.session(session) as key:
                own = interface.Endpoint(self.endpoint.url, key, self.endpoint.model)
                playing = asyncio.ensure_future(self.agents.play(episode.problem, own))
                try:
                    await asyncio.wait({playing, session.failed}, return_when=asyncio.FIRST_COMPLETED)
                    reward = session.failed.result() if session.failed.done() else playing.result()
                finally:
                    playing.cancel()
                    session.failed.cancel()
        except CallError:
            if not session.is_full:
                raise
            episode.ending, reward = "length", None
        finally:
            session.waited()
        if not episode.turns:
            raise CallError("the agent asked the endpoint for no response")
        if reward is not None:
            try:
                episode.reward = checked_reward("the agent", reward)
            except RewardError as error:
                raise as_call_error(error) from error


class _AgentSession:
    """`CompletionHandler` of one episode. Each request continues the tokens of the previous one."""

    def __init__(self, episode: Episode, assistant: Assistant, training: Sampling):
        self._episode, self._assistant, self._training = episode, assistant, training
        self._one_by_one = asyncio.Lock()
        self._waits()
        # Whether the conversation is too long for another response.
        self.is_full = False
        # Set if the engines fail: the run's error, not the agent's.
        self.failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def respond(self, asked: ApiRequest, progress: ChoiceProgress | None = None) -> Answer:
        """See `CompletionHandler.respond`. A stream is a single chunk at the end."""
        if not isinstance(asked, ChatRequest):
            raise RefusedError(400, "an agent's episode is a chat: use /chat/completions instead of /completions")
        if asked.tools:
            fix = "describe the tools in a message, or let environment.name answer the calls"
            raise RefusedError(400, f"tools are not supported in an agent's episode: {fix}", "tools")
        episode, assistant, tokens, new = self._episode, self._assistant, (), ()
        async with self._one_by_one:
            sampling = self._sampling(asked)
            if not episode.turns:
                (opening,) = await self._tokenized(asked, lambda: asked.prompts(assistant.tokenizer))
                episode.begin(opening, asked.chat())
            else:
                new = self._new(asked.chat())
                try:
                    work = partial(assistant.tokenizer.between_turns, new, episode.tokens[-1])
                    tokens = tuple(await self._tokenized(asked, work))
                except DataError as error:
                    raise RefusedError(400, str(error), "messages") from None
            prompt = (*episode.tokens, *tokens)
            try:
                sampling = limited(sampling, asked, len(prompt), assistant.max_length)
            except RefusedError as refused:
                self.is_full = refused.code == FULL and bool(episode.turns)
                raise
            self.waited()
            try:
                await assistant.respond(tokens, new, sampling)
            except (EngineError, WorkerError) as error:
                if not self.failed.done():
                    self.failed.set_exception(error)
                raise
            finally:
                self._waits()
            self.is_full, (_, completion) = False, episode.turns[-1]
            return Answer((prompt,), (completion,))

    async def _tokenized[T](self, asked: ChatRequest, work: Callable[[], T]) -> T:
        """See `tokenized`. Note if a conversation has become too long."""
        try:
            return await tokenized(asked, work, self._assistant.tokenizer, self._assistant.max_length)
        except RefusedError as refused:
            self.is_full = refused.code == FULL and bool(self._episode.turns)
            raise

    def waited(self) -> None:
        """Note that the episode no longer waits for the agent."""
        if self._episode.waits_for == "environment":
            self._episode.spans[-1].end = time.perf_counter()

    def _waits(self) -> None:
        self._episode.spans.append(Span("environment", time.perf_counter()))

    def _new(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the new messages. Raises RefusedError: the request does not continue the episode."""
        known = [*self._episode.prompt, *self._episode.said]
        for number, (before, now) in enumerate(zip(known, messages, strict=False), start=1):
            if _compared(before) != _compared(now):
                raise _rewritten(f"message {number} was {before!r:.80} before, and is {now!r:.80} now")
        new = tuple(messages[len(known) :])
        if not new:
            raise _rewritten(f"it has {len(messages)} messages, and the conversation {len(known)} already")
        if "assistant" in [message["role"] for message in new]:
            raise _rewritten("an assistant message was not generated by the policy")
        return new

    def _sampling(self, asked: ChatRequest) -> Sampling:
        """Return the episode's sampling. Raises RefusedError: the request asks for another."""
        own, training = self._assistant.sampling, self._training
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(asked, name)
            if value not in (None, getattr(training, name), getattr(own, name)):
                rule = f"training samples with generation.{name} = {getattr(training, name)}, which the loss relies on"
                raise RefusedError(400, f"{name} = {value}: {rule}; leave it out, or set that key", name)
        if asked.stop:
            raise RefusedError(400, "stop: set generation.stop_strings, which holds for all responses", "stop")
        if asked.n not in (None, 1):
            rule = "an agent's episode is one sequence of tokens, so a request has one answer"
            raise RefusedError(400, f"n = {asked.n}: {rule}; leave it out", "n")
        if changed := asked.options().changed():
            rule = "training samples from the policy's own distribution, and keeps only the sampled token's logprob"
            raise RefusedError(400, f"{', '.join(changed)}: {rule}; leave it out", changed[0])
        if asked.seed is not None:
            rule = "seed: seeds follow from algorithm.seed, the step and the episode; leave it out"
            raise RefusedError(400, rule, "seed")
        return own


def _compared(message: Message) -> Message:
    """Return the part of a message that must not change. Frameworks may trim assistant messages."""
    if message["role"] == "assistant":
        return {"role": "assistant", "content": message["content"].strip()}
    return message


def _rewritten(why: str) -> RefusedError:
    return RefusedError(
        400,
        f"the request does not continue its episode: {why}. Send all messages again as they were, the assistant's "
        "included, and new ones after them: training needs one sequence of tokens, in the order of sampling",
        "messages",
        "history_rewritten",
    )
