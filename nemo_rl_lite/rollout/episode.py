"""One sampled sequence: a prompt, the assistant's turns, and what an environment says between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nemo_rl_lite.data.problems import Message, Problem
from nemo_rl_lite.generation.interface import Completion

Ending = Literal["stop", "length", "turns"]
"""Ended by itself or by the environment; cut for want of room; all turns used up."""


@dataclass
class Episode:
    """Grows turn by turn; `tokens` are always exactly those that were sampled."""

    problem: Problem
    tokens: list[int]
    """The prompt, and everything after it."""
    prompt_length: int
    turns: list[tuple[int, Completion]] = field(default_factory=list)
    """The assistant's turns, and where in `tokens` each begins."""
    said: list[Message] = field(default_factory=list)
    """What was said since the problem's messages."""
    reward: float | None = None
    """What the environment has given so far; None where it gave nothing."""
    ending: Ending = "stop"

    def add_turn(self, completion: Completion, text: str) -> None:
        """The assistant's turn; one that was cut is the last."""
        self.turns.append((len(self.tokens), completion))
        self.tokens += completion.tokens
        self.said.append({"role": "assistant", "content": text})
        self.ending = completion.finish_reason

    def add_messages(self, tokens: Sequence[int], messages: Sequence[Message]) -> None:
        """What the environment says, and the tokens from the assistant's last turn to its next."""
        self.tokens += tokens
        self.said += messages

    @property
    def response(self) -> str:
        """Text of the assistant's last turn."""
        return self.said[-1]["content"]

    def completion(self) -> Completion:
        """All turns as one: generated tokens and their logprobs."""
        reason = "length" if self.ending == "length" else "stop"
        parts = [completion for _, completion in self.turns]
        if len(parts) == 1 and parts[0].finish_reason == reason:
            return parts[0]
        tokens = tuple(token for part in parts for token in part.tokens)
        return Completion(tokens, tuple(logprob for part in parts for logprob in part.logprobs), reason)


def as_tensors(episodes: Sequence[Episode], padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [B, T] (int64), right-padded; 1 where a token was generated [B, T], else 0; the engine's logprobs of those
    [B, T], else 0; lengths [B] (int64).
    """
    lengths_B = torch.tensor([len(episode.tokens) for episode in episodes])
    shape = (len(episodes), int(lengths_B.max()))
    tokens_BT, mask_BT, logprobs_BT = torch.full(shape, padding), torch.zeros(shape), torch.zeros(shape)
    for row, episode in enumerate(episodes):
        tokens_BT[row, : len(episode.tokens)] = torch.tensor(episode.tokens)
        for start, completion in episode.turns:
            stop = start + len(completion.tokens)
            mask_BT[row, start:stop] = 1.0
            logprobs_BT[row, start:stop] = torch.tensor(completion.logprobs)
    return tokens_BT, mask_BT, logprobs_BT, lengths_B
