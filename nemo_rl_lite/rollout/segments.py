"""Segments of an episode, and how a request's messages continue or branch them.

An agent sends its messages with each request. If they continue a segment, the response becomes its next turn. Otherwise
the agent has changed its history, or two requests run at the same time, and a new segment begins. Up to the last
assistant message that both share, the new segment has the tokens of the old one. They are part of its prompt and have
no loss there, so each sampled token is trained once.

For each request, an endpoint calls `Episode.start_of`, `ChatTokenizer.continuation` (or `prompt` without a segment),
`Assistant.answer`, and then `Segment.note` with the response.

Messages are equal in the form in which requests repeat them, which the endpoint defines. A framework may for example
drop the reasoning of a response; the segment has the sampled tokens in any case.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.generation.interface import Completion, Conversation, Unfinished
from nemo_rl_lite.losses.batch import OF_TOKENS


@dataclass(eq=False)
class History:
    """State of a segment in play."""

    number: int = 0
    """Place of the segment among those of its episode."""
    messages: list[Message] = field(default_factory=list)
    """All messages up to the last response, as requests repeat them."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Places to branch, each after an assistant message: number of messages and of tokens before it."""
    conversation: Conversation = field(default_factory=Conversation)
    is_busy: bool = False
    """True while a response to the segment is sampled."""
    begun: Unfinished | None = None
    """Tokens of the next response that a checkpoint had."""

    @property
    def so_far(self) -> Unfinished | None:
        """The known tokens of the next response."""
        so_far = self.conversation.so_far
        return self.begun if so_far is None else so_far()


class RowCounts(NamedTuple):
    """Counts of a training row."""

    length: int
    versions: Mapping[int, int]
    """Number of sampled tokens by version of the weights."""


class Segment:
    """A sequence that grows turn by turn. Sampled tokens are never tokenized again."""

    tokens: list[int]
    """Prompt and all later tokens."""
    prompt_length: int
    """Number of tokens before the first turn. A branch includes those that another segment sampled."""
    turns: list[tuple[int, Completion]]
    """The assistant turns, each with its position in `tokens`."""
    said: list[Message]
    """All messages after the prompt."""
    own_prompt: tuple[Message, ...] | None
    own_tools: tuple[Tool, ...] | None
    history: History

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first turn."""
        return self.own_prompt or ()

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt offers."""
        return self.own_tools or ()

    def begin(self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Replace the prompt, before the first turn."""
        self.tokens, self.prompt_length = list(tokens), len(tokens)
        self.own_prompt, self.own_tools = tuple(messages), tuple(tools)

    def add_messages(self, tokens: Sequence[int], messages: Sequence[Message]) -> None:
        """Add messages of the environment or agent, with the tokens up to the next assistant turn."""
        self.tokens += tokens
        self.said += messages

    def extend(self, completion: Completion, text: str) -> None:
        """Add an assistant turn; see `Episode.add_turn`."""
        self.turns.append((len(self.tokens), completion))
        self.tokens += completion.tokens.tolist()
        self.said.append({"role": "assistant", "content": text})

    def note(self, messages: Sequence[Message]) -> None:
        """Note all messages up to the last response, as requests will repeat them, so that they can continue."""
        self.history.messages = list(messages)
        self.history.ends.append((len(messages), len(self.tokens)))

    @property
    def sampled_count(self) -> int:
        """Number of tokens sampled in this segment."""
        return sum(len(completion.tokens) for _, completion in self.turns)

    def sampled_runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of tokens that one version of the weights sampled: position, number of tokens, version."""
        for start, completion in self.turns:
            for version, length in completion.versions:
                yield start, length, version
                start += length

    @property
    def row_counts(self) -> RowCounts:
        # A plain dict: a Counter takes longer to unpickle than the rest of a record.
        found: dict[int, int] = {}
        for _, length, version in self.sampled_runs():
            found[version] = found.get(version, 0) + length
        return RowCounts(len(self.tokens), found)

    def generation_logprobs(self) -> np.ndarray:
        """Return the engines' logprob of each token, float32; 0 for tokens that they did not sample here."""
        logprobs = np.zeros(len(self.tokens), OF_TOKENS["generation_logprobs"])
        for start, completion in self.turns:
            logprobs[start : start + len(completion.logprobs)] = completion.logprobs
        return logprobs

    def routed_experts(self, no_experts: np.ndarray | None) -> np.ndarray | None:
        """Return the routed experts of all tokens that an engine has read, from the first turn that read each. No
        engine has read the last token. `no_experts`: those of 0 tokens; None if no engine reports any."""
        if no_experts is None:
            return None
        parts, known = [no_experts], 0
        for _, completion in self.turns:
            if completion.routed_experts is not None:
                parts.append(completion.routed_experts[known:])
                known = len(completion.routed_experts)
        return np.concatenate(parts)


@dataclass
class Branch(Segment):
    """A segment after the first one of an episode."""

    tokens: list[int]
    prompt_length: int
    own_prompt: tuple[Message, ...] | None
    own_tools: tuple[Tool, ...] | None
    turns: list[tuple[int, Completion]] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    history: History = field(default_factory=History, compare=False, repr=False)


@dataclass(frozen=True)
class Start:
    """The beginning that a request's messages share with a segment, up to the end of an assistant message."""

    segment: Segment | None = None
    messages: int = 0
    length: int = 0
    """Number of tokens."""

    @property
    def tokens(self) -> list[int]:
        return [] if self.segment is None else self.segment.tokens[: self.length]

    @property
    def continues(self) -> bool:
        """True if the segment has no further tokens and no request."""
        segment = self.segment
        return segment is not None and self.length == len(segment.tokens) and not segment.history.is_busy

    def branch(self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool], number: int) -> Branch:
        """Return a segment whose prompt has these messages: the tokens of the beginning, and then `tokens`."""
        own, history = [*self.tokens, *tokens], History(number)
        if self.segment is not None:
            before = self.segment.history
            history.ends = [end for end in before.ends if end[1] <= self.length]
            # The engine has the beginning in its KV cache.
            conversation = before.conversation
            history.conversation = Conversation(engine=conversation.engine, cache_version=conversation.cache_version)
        return Branch(own, len(own), tuple(messages), tuple(tools), history=history)


def longest_start(segments: Sequence[Segment], messages: Sequence[Message], tools: Sequence[Tool]) -> Start:
    """Return the longest beginning of `messages`, as requests repeat them, that a segment with these tools has. Of
    equals, one that continues its segment."""
    found = Start()
    for segment in segments:
        if segment.tools != tuple(tools):
            continue
        pairs = zip(segment.history.messages, messages, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        count, length = max((end for end in segment.history.ends if end[0] <= shared), default=(0, 0))
        own = Start(segment, count, length)
        if count and (count, own.continues) > (found.messages, found.continues):
            found = own
    return found
