"""What a policy is asked and how it is judged: problems from a file or from a generator. Imports nothing heavy.

A training set answers `problem(position)` for every position from 0 on, epoch after epoch, so that a run's place in its
data is one integer.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

from nemo_rl_lite.config.schema import DataConfig
from nemo_rl_lite.errors import DataError

Message = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """A chat to continue and the reference answer the reward compares with."""

    messages: tuple[Message, ...]
    answer: str


class TrainingSet(Protocol):
    """Problems in training order."""

    def problem(self, position: int) -> Problem: ...

    def finite(self) -> Sequence[Problem]:
        """All of them, where they are a list; none where they are generated without end."""
        ...


@dataclass(frozen=True)
class FileSet:
    """A finite list, in an order that is shuffled anew each epoch from `(seed, epoch)`."""

    problems: tuple[Problem, ...]
    seed: int
    shuffle: bool

    def problem(self, position: int) -> Problem:
        epoch, place = divmod(position, len(self.problems))
        return self.problems[_shuffled(len(self.problems), f"{self.seed}/{epoch}")[place] if self.shuffle else place]

    def finite(self) -> Sequence[Problem]:
        return self.problems


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: str) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


@dataclass(frozen=True)
class ReverseDigits:
    """Reverse a string of digits. Held-out strings are fixed by the task, never by the seed, and never trained on."""

    num_digits: int
    seed: int
    system_prompt: str | None = None

    HELD_OUT = 300

    def problem(self, position: int) -> Problem:
        source = random.Random(f"{self.seed}/{position}")
        while (digits := self._draw(source)) in self._held_out:
            pass
        return self._as_problem(digits)

    def finite(self) -> Sequence[Problem]:
        return ()

    def validation(self) -> list[Problem]:
        return [self._as_problem(digits) for digits in self._held_out]

    @cached_property
    def _held_out(self) -> dict[str, None]:
        source = random.Random(f"held-out/{self.num_digits}")
        digits: dict[str, None] = {}
        while len(digits) < min(self.HELD_OUT, 10**self.num_digits // 4):
            digits[self._draw(source)] = None
        return digits

    def _draw(self, source: random.Random) -> str:
        return "".join(source.choices("0123456789", k=self.num_digits))

    def _as_problem(self, digits: str) -> Problem:
        return Problem(chat(digits, self.system_prompt), digits[::-1])


GENERATED = {"reverse_digits": ReverseDigits}


def training_set(config: DataConfig, seed: int) -> TrainingSet:
    """The training problems of a configuration, shuffled or generated from `seed`.

    Raises:
        DataError: naming file, row and what is wrong.
    """
    if config.name in GENERATED:
        return GENERATED[config.name](**config.task_kwargs, seed=seed, system_prompt=config.system_prompt)
    return FileSet(tuple(read_problems(config, config.train_path)), seed, config.shuffle)


def validation_set(config: DataConfig, limit: int) -> list[Problem]:
    """At most `limit` held-out problems, always the same ones; empty where the configuration names none.

    Raises:
        DataError: naming file, row and what is wrong.
    """
    if config.name in GENERATED:
        generated = GENERATED[config.name](**config.task_kwargs, seed=0, system_prompt=config.system_prompt)
        return generated.validation()[:limit]
    if config.validation_path is None:
        return []
    return read_problems(config, config.validation_path)[:limit]


def read_problems(config: DataConfig, path: str | None, limit: int | None = None) -> list[Problem]:
    """Problems from a JSON-lines file, the first `limit` of them.

    Raises:
        DataError: the file is missing or empty, or a row is no JSON object, lacks a column or has a wrong type.
    """
    if path is None:
        raise DataError("data.train_path is null: name a JSON-lines file")
    problems = []
    for row_number, row in _rows(Path(path)):
        where = f"{path}, row {row_number}"
        prompt, answer = (_column(row, name, where) for name in (config.prompt_column, config.answer_column))
        if not isinstance(answer, (str, int, float)):
            raise DataError(f"{where}: column '{config.answer_column}' must be text or a number, not a structure")
        problems.append(Problem(chat(prompt, config.system_prompt, where), str(answer)))
        if limit is not None and len(problems) >= limit:
            break
    if not problems:
        raise DataError(f"{path}: no rows")
    return problems


def chat(prompt: object, system_prompt: str | None = None, where: str = "prompt") -> tuple[Message, ...]:
    """A prompt (text, or a list of chat messages) as messages, the system prompt first where there is one."""
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        messages = prompt
    else:
        raise DataError(f"{where}: the prompt must be text or a list of {{role, content}} messages")
    return (*([{"role": "system", "content": system_prompt}] if system_prompt else []), *messages)


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    try:
        with path.expanduser().open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _parse(line, f"{path}, row {number}")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _parse(line: str, where: str) -> Mapping[str, object]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON object is needed, found {type(row).__name__}")
    return row


def _column(row: Mapping[str, object], name: str, where: str) -> object:
    if name not in row:
        raise DataError(f"{where}: no column '{name}' (columns: {', '.join(row)})")
    if row[name] is None:
        raise DataError(f"{where}: column '{name}' is null")
    return row[name]


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
