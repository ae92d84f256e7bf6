"""Reversing a string of digits is the task of the embedded model."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from nemo_rl_lite.data.problems import Problem, chat


@dataclass(frozen=True)
class ReverseDigits:
    """Reverse a string of digits. The task, not the seed, fixes the held-out strings, which are never trained on."""

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

    def only(self, fits: Callable[[Problem], bool]) -> Self:
        """Return the whole set: all problems have one length, so either all fit or none."""
        return self

    def validation(self, limit: int) -> list[Problem]:
        return [self._as_problem(digits) for digits in self._held_out][:limit]

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
        return Problem(chat(digits, self.system_prompt), digits[::-1], {"mistake": _mistake(digits[::-1])})


def _mistake(answer: str) -> str:
    """Exchange the first two neighbouring digits of the answer that differ."""
    for place in range(len(answer) - 1):
        if answer[place] != answer[place + 1]:
            return answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]
    return answer[:-1] + str((int(answer[-1]) + 1) % 10)
