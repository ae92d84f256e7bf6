"""What a policy is asked and how it is judged. Imports nothing heavy.

A training set answers `problem(position)` for every position from 0 on, epoch after epoch, so that a run's place in its
data is one integer.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from nemo_rl_lite.errors import DataError

# Role and content; of the assistant also tool calls, of a tool which call it answers.
Message = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A chat to continue and the reference answer the reward compares with.

    `metadata` is what else is known of it: the columns of its row, or the entry of the task that generated it.
    """

    messages: tuple[Message, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Asked(Protocol):
    """What a run trains on, by what is asked in it."""

    @property
    def messages(self) -> tuple[Message, ...]: ...


class TrainingSet[T: Asked](Protocol):
    """Problems, or what else is trained on, in training order."""

    def problem(self, position: int) -> T: ...

    def finite(self) -> Sequence[T]:
        """All of them, where they are a list; none where they are generated without end."""
        ...

    def only(self, fits: Callable[[T], bool]) -> "TrainingSet[T]":
        """The same in the same order, without those that do not fit."""
        ...


@dataclass(frozen=True)
class FileSet[T: Asked]:
    """A finite list, in an order that is shuffled anew each epoch from `(seed, epoch)`."""

    problems: tuple[T, ...]
    seed: int
    shuffle: bool

    def problem(self, position: int) -> T:
        epoch, place = divmod(position, len(self.problems))
        return self.problems[_shuffled(len(self.problems), f"{self.seed}/{epoch}")[place] if self.shuffle else place]

    def finite(self) -> Sequence[T]:
        return self.problems

    def only(self, fits: Callable[[T], bool]) -> "FileSet[T]":
        return replace(self, problems=tuple(filter(fits, self.problems)))


@dataclass(frozen=True)
class Derived[T: Asked]:
    """A generated task's problems as something else that is trained on."""

    task: TrainingSet[Problem]
    derive: Callable[[Problem], T]

    def problem(self, position: int) -> T:
        return self.derive(self.task.problem(position))

    def finite(self) -> Sequence[T]:
        return ()

    def only(self, fits: Callable[[T], bool]) -> "Derived[T]":
        return replace(self, task=self.task.only(lambda problem: fits(self.derive(problem))))


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: str) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def chat(prompt: object, system_prompt: str | None = None, where: str = "prompt") -> tuple[Message, ...]:
    """A prompt (text, or a list of chat messages) as messages, the system prompt first where there is one."""
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        messages = prompt
    else:
        raise DataError(f"{where}: the prompt must be text or a list of {{role, content}} messages")
    return with_system(tuple(messages), system_prompt)


def with_system(messages: tuple[Message, ...], system_prompt: str | None) -> tuple[Message, ...]:
    """The messages behind the system prompt, unless they have a system message of their own."""
    if not system_prompt or messages[0]["role"] in ("system", "developer"):
        return messages
    return ({"role": "system", "content": system_prompt}, *messages)


def is_held_out(problem: Asked, fraction: float) -> bool:
    """Whether a problem, or what else is trained on, is among the `fraction` of all that is kept for validation.

    Its messages decide, but for the system prompt, and nothing else: not the seed, its place or the other problems. So
    two rows that ask the same are on the same side.
    """
    asked = [[message["role"], message["content"]] for message in problem.messages if message["role"] != "system"]
    digest = hashlib.sha256(json.dumps(asked).encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
