"""One sampled sequence: a prompt, the assistant's turns, and what an environment says between them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nemo_rl_lite.data.problems import Message, Problem
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.losses.batch import NO_EXPERT, OF_TOKENS, TokenRow

Ending = Literal["stop", "length", "turns", "error"]
"""The policy, the environment or the agent ended it; it was cut for lack of room; no turn is left; its environment or
agent failed."""


Activity = Literal["generate", "environment", "reward"]


@dataclass
class Span:
    """What an episode waits for: a response from the engine `place`, its environment (or agent), or its reward. Times
    are seconds of `time.perf_counter()`; it has no end while it lasts."""

    what: Activity
    begin: float
    end: float | None = None
    place: int = 0

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return (time.perf_counter() if self.end is None else self.end) - self.begin


@dataclass
class Episode:
    """A sequence that grows turn by turn; `tokens` are always exactly those that were sampled."""

    problem: Problem
    tokens: list[int]
    """The prompt, and everything after it."""
    prompt_length: int
    turns: list[tuple[int, Completion]] = field(default_factory=list)
    """The assistant's turns, and where in `tokens` each begins."""
    said: list[Message] = field(default_factory=list)
    """All messages since the prompt's, by the assistant, and by the environment or the agent."""
    reward: float | None = None
    """The sum of the environment's rewards so far, or None; once the episode is judged, its reward, or None where that
    failed."""
    ending: Ending = "stop"
    spans: list[Span] = field(default_factory=list)
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is the weighted sum of, by name, where it has several parts."""
    is_left_out: bool = False
    """Whether it is kept out of the loss although it has a reward."""
    own_prompt: tuple[Message, ...] | None = None
    """The messages of the prompt, where they are not the problem's."""

    def begin(self, tokens: Sequence[int], messages: Sequence[Message]) -> None:
        """Replace the prompt, before the first turn."""
        self.tokens, self.prompt_length, self.own_prompt = list(tokens), len(tokens), tuple(messages)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Add the assistant's turn; one that was cut is the last."""
        self.turns.append((len(self.tokens), completion))
        self.tokens += completion.tokens
        self.said.append({"role": "assistant", "content": text})
        self.ending = completion.finish_reason

    def add_messages(self, tokens: Sequence[int], messages: Sequence[Message]) -> None:
        """Add what the environment says, and the tokens from the assistant's last turn to its next."""
        self.tokens += tokens
        self.said += messages

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first turn."""
        return self.problem.messages if self.own_prompt is None else self.own_prompt

    @property
    def response(self) -> str:
        """Text of the assistant's last turn; empty where there is none."""
        return next((said["content"] for said in reversed(self.said) if said["role"] == "assistant"), "")

    @property
    def generated(self) -> int:
        """Tokens that the policy sampled, in all turns together."""
        return sum(len(completion.tokens) for _, completion in self.turns)

    @contextmanager
    def waiting(self, what: Activity) -> Iterator[Span]:
        """Within the block the episode waits for `what`."""
        span = Span(what, time.perf_counter())
        self.spans.append(span)
        try:
            yield span
        finally:
            span.end = time.perf_counter()

    @property
    def waits_for(self) -> Activity | None:
        """What the episode waits for at present."""
        return self.spans[-1].what if self.spans and self.spans[-1].end is None else None

    def seconds(self, what: Activity) -> float:
        """How long the episode waited for `what`, in all its turns together."""
        return sum(span.seconds for span in self.spans if span.what == what)

    @property
    def is_trained(self) -> bool:
        """Whether the loss is over the episode."""
        return self.reward is not None and not self.is_left_out

    def row(self, advantage: float, version: int, experts: tuple[int, ...] | None = None) -> TokenRow:
        """The episode to train on, by a policy of this version: the loss is on the tokens that were sampled, or on none
        where the episode is left out or has no reward. `experts`: of how many layers, and how many of each, the engines
        tell for a token."""
        length = len(self.tokens)
        mask, logprobs, ages = (np.zeros(length, OF_TOKENS[name]) for name in ("mask", "generation_logprobs", "ages"))
        for start, completion in self.turns:
            own = slice(start, start + len(completion.tokens))
            mask[own], logprobs[own] = self.is_trained, completion.logprobs
            ages[own] = version - np.asarray(completion.versions, OF_TOKENS["ages"])
        tokens = np.asarray(self.tokens, OF_TOKENS["tokens"])
        reward, own = (0.0, 0.0) if self.reward is None else (self.reward, advantage)
        return TokenRow(tokens, mask, logprobs, own, ages, reward, routed_experts=self._experts(experts))

    def _experts(self, shape: tuple[int, ...] | None) -> np.ndarray | None:
        """The experts of each token, [tokens, *shape]: those of the turn that met it first, whose logprobs are trained
        on. `NO_EXPERT` for the last token, which no engine has read."""
        if shape is None:
            return None
        found, known = np.full((len(self.tokens), *shape), NO_EXPERT, OF_TOKENS["routed_experts"]), 0
        for _, completion in self.turns:
            if completion.routed_experts is not None:
                found[known : len(completion.routed_experts)] = completion.routed_experts[known:]
                known = len(completion.routed_experts)
        return found
