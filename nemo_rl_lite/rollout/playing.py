"""How an episode is played: one turn, with an environment (`turns.py`), or by an agent (`agents.py`)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from nemo_rl_lite.data.problems import Message
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.generation.interface import Request, Requests, Sampling
from nemo_rl_lite.rollout.episode import Episode

Section = Literal["environment", "agent"]
"""The section of the configuration about the user's code that takes part in episodes."""


@dataclass
class Assistant:
    """The policy in one episode: it samples the episode's responses, each with a seed that follows from `seeds` and the
    number of the turn."""

    episode: Episode
    requests: Requests
    tokenizer: ChatTokenizer
    sampling: Sampling
    seeds: tuple[int, ...]
    max_length: int
    """The most tokens of an episode, the response to come included."""
    _near: int | None = field(default=None, init=False)

    @property
    def room(self) -> int:
        """The most tokens before a response that may be of full length."""
        return self.max_length - self.sampling.max_new_tokens

    async def respond(
        self, tokens: Sequence[int] = (), messages: Sequence[Message] = (), sampling: Sampling | None = None
    ) -> None:
        """Add messages to the episode, which are `tokens` after its last turn, and the policy's response to them. The
        episode stays as it is where there is no response.

        Raises:
            EngineError, WorkerError: see `RequestQueue.sample`.
        """
        episode = self.episode
        seed = request_seed(*self.seeds, len(episode.turns))
        request = Request((*episode.tokens, *tokens), sampling or self.sampling, seed)
        with episode.waiting("generate") as span:
            completion, span.place = await self.requests.sample(request, self._near)
        self._near = span.place
        episode.add_messages(tokens, messages)
        episode.add_turn(completion, self.tokenizer.text(completion.tokens))


class Play(Protocol):
    """Plays episodes."""

    section: ClassVar[Section]

    async def play(self, episode: Episode, assistant: Assistant) -> None:
        """Bring the episode to its end, with a reward or, where the configured reward is to judge it, without.

        Raises:
            CallError: the user's code fails, and with it this episode.
            DataError: the run's data or code cannot be used at all.
        """
        ...


class SingleTurn:
    """One response to the prompt."""

    section: ClassVar[Section] = "environment"

    async def play(self, episode: Episode, assistant: Assistant) -> None:
        """See `Play.play`."""
        await assistant.respond()


def request_seed(*numbers: int) -> int:
    """Return a seed of 31 bits that follows from the numbers; other numbers give another seed."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
