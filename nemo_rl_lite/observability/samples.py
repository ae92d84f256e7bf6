"""Chooses samples of a rollout and turns them into text. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One sample as text."""

    prompt: str
    response: str
    reward: float


def spread(rewards: Sequence[float], count: int) -> list[int]:
    """`count` indices (all where there are fewer), evenly from the lowest reward to the highest; equal ones in
    order."""
    order = sorted(range(len(rewards)), key=lambda index: rewards[index])
    if len(order) <= count:
        return order
    return [order[round(index * (len(order) - 1) / max(count - 1, 1))] for index in range(count)]


def text_of(messages: Sequence[dict[str, Any]]) -> str:
    """The content of the messages, with their roles where there is more than one."""
    if len(messages) == 1:
        return messages[0]["content"] or ""
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in messages)
