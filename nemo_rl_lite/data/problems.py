"""Problems and training sets. This module imports nothing heavy.

A training set has a `problem(position)` for every position from 0, epoch after epoch. So one integer is a run's
position in its data.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from nemo_rl_lite.data.messages import Message, read_messages, refuse_chat_as_text
from nemo_rl_lite.errors import DataError


@dataclass(frozen=True)
class Problem:
    """A chat to continue, and its reference answer."""

    messages: tuple[Message, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The columns of the problem's row, or the entry of the task that generated it."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions that the assistant may call, in OpenAI's format."""
    source: str = field(default="", repr=False)
    """Name of its source in a mixture (`data.sources`)."""


class LeftOut(str):
    """Reason for leaving out rows, as a predicate: "have no reward"."""


class Prompted(Protocol):
    """A training item; `messages` is its prompt."""

    @property
    def messages(self) -> tuple[Message, ...]: ...


class TrainingSet[T: Prompted](Protocol):
    """Problems, chats or pairs in training order."""

    def problem(self, position: int) -> T: ...

    def finite(self) -> Sequence[T]:
        """Return all items of a finite set; none of an endless one."""
        ...

    def only(self, fits: Callable[[T], bool]) -> "TrainingSet[T]":
        """Return the set in the same order, without the items that do not fit."""
        ...


@dataclass(frozen=True)
class FileSet[T: Prompted]:
    """A finite list, shuffled in each epoch by `(seed, epoch)`."""

    problems: tuple[T, ...]
    seed: int
    shuffle: bool
    _orders: dict[int, list[int]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Orders of the last two epochs that were read: neighbours at the end of an epoch."""

    def problem(self, position: int) -> T:
        epoch, place = divmod(position, len(self.problems))
        return self.problems[self._shuffled(epoch)[place] if self.shuffle else place]

    def finite(self) -> Sequence[T]:
        return self.problems

    def only(self, fits: Callable[[T], bool]) -> "FileSet[T]":
        return replace(self, problems=tuple(filter(fits, self.problems)))

    def _shuffled(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.problems)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            for old in [*self._orders][:-1]:
                del self._orders[old]
            self._orders[epoch] = order
        return self._orders[epoch]


@dataclass(frozen=True)
class Derived[T: Prompted]:
    """Problems of a generated task, converted to chats or pairs."""

    task: TrainingSet[Problem]
    derive: Callable[[Problem], T]

    def problem(self, position: int) -> T:
        return self.derive(self.task.problem(position))

    def finite(self) -> Sequence[T]:
        return ()

    def only(self, fits: Callable[[T], bool]) -> "Derived[T]":
        return replace(self, task=self.task.only(lambda problem: fits(self.derive(problem))))


def chat(prompt: object, system_prompt: str | None = None, where: str = "prompt") -> tuple[Message, ...]:
    """Return a prompt (text, number or list of chat messages) as messages, after the system prompt if there is one.

    Raises:
        DataError: the prompt has another type, is empty, or ends with the assistant.
    """
    if isinstance(prompt, str | int | float):
        text = str(prompt)
        refuse_chat_as_text(text, f"{where}, the prompt")
        messages = ({"role": "user", "content": text},)
    elif isinstance(prompt, list) and prompt:
        messages = read_messages(prompt, f"{where}, the prompt")
    else:
        found = type(prompt).__name__
        raise DataError(f"{where}: the prompt must be text or a list of {{role, content}} messages, found {found}")
    if messages[-1]["role"] == "assistant":
        rule = "the prompt ends with an assistant message (algorithm=sft trains on whole chats)"
        raise DataError(f"{where}: {rule}")
    if not messages[-1]["content"].strip():
        raise DataError(f"{where}: the prompt is empty")
    return with_system(messages, system_prompt)


def with_system(messages: tuple[Message, ...], system_prompt: str | None) -> tuple[Message, ...]:
    """Put the system prompt before the messages, unless they begin with a system message."""
    if not system_prompt or messages[0]["role"] in ("system", "developer"):
        return messages
    return ({"role": "system", "content": system_prompt}, *messages)


def is_held_out(problem: Prompted, fraction: float) -> bool:
    """Return whether an item belongs to the held-out `fraction`. Only its prompt decides, without the system prompt,
    so rows with equal prompts stay together, whatever the seed."""
    return place(problem) < fraction


def place(problem: Prompted) -> float:
    """Return a hash of a row's prompt as a number from 0 to 1."""
    asked = [[message["role"], message["content"]] for message in problem.messages if message["role"] != "system"]
    digest = hashlib.sha256(json.dumps(asked).encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64
