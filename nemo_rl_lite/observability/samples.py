"""A few samples of a rollout, as they are shown to people. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One sample as it is shown to people."""

    prompt: str
    response: str
    reward: float


def spread(rewards: Sequence[float], count: int) -> list[int]:
    """`count` places (all where there are fewer), evenly from the lowest reward to the highest; equal ones in order."""
    order = sorted(range(len(rewards)), key=lambda place: rewards[place])
    if len(order) <= count:
        return order
    return [order[round(index * (len(order) - 1) / max(count - 1, 1))] for index in range(count)]


def text_of(messages: Sequence[dict[str, Any]]) -> str:
    """What was said; with who said it where that is more than one message."""
    if len(messages) == 1:
        return messages[0]["content"] or ""
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in messages)
