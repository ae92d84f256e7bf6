"""The interface of a tracker, and the samples of a rollout that it shows. Imports nothing heavy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Sample:
    """One sample of a rollout as text."""

    prompt: str
    response: str
    reward: float


def spread(rewards: Sequence[float], count: int) -> list[int]:
    """At most `count` indices, evenly from the lowest reward to the highest; equal ones in order."""
    order = sorted(range(len(rewards)), key=lambda index: rewards[index])
    if len(order) <= count:
        return order
    return [order[round(index * (len(order) - 1) / max(count - 1, 1))] for index in range(count)]


def text_of(messages: Sequence[dict[str, Any]]) -> str:
    """The content of the messages, with their roles where there is more than one."""
    if len(messages) == 1:
        return messages[0]["content"] or ""
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in messages)


@dataclass(frozen=True)
class Chart:
    """A bar chart: each row has a label first and its value last."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str | float | None, ...]]


class Sink:
    """Receives a run's metrics; by default ignores them."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of one step."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples of the step's rollout, ordered from the lowest reward to the highest."""

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        """Log the summary of a run that is done."""

    def close(self) -> None:
        """Write what is still in memory."""
