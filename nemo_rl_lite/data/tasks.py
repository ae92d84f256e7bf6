"""Tasks that generate endless problems: that of the embedded model, and those of the package reasoning-gym."""

import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol, Self

from nemo_rl_lite.config.schema import DataConfig
from nemo_rl_lite.data.formats import to_problem
from nemo_rl_lite.data.problems import Problem, TrainingSet, chat, is_held_out
from nemo_rl_lite.errors import DataError


class Task(TrainingSet[Problem], Protocol):
    """A generated training set that also generates held-out problems."""

    def validation(self, limit: int) -> list[Problem]: ...


@dataclass(frozen=True)
class ReverseDigits:
    """Reverse a string of digits. The held-out strings do not depend on the seed, and are never trained on."""

    num_digits: int
    seed: int
    system_prompt: str | None = None

    HELD_OUT = 300

    def problem(self, position: int) -> Problem:
        source = random.Random(f"{self.seed}/{position}")
        while (digits := self._draw(source)) in self._held_out:
            pass
        return self.problem_of(digits)

    def problem_of(self, digits: str) -> Problem:
        return Problem(chat(digits, self.system_prompt), digits[::-1], {"mistake": _mistake(digits[::-1])})

    def finite(self) -> Sequence[Problem]:
        return ()

    def only(self, fits: Callable[[Problem], bool]) -> Self:
        """Return the whole set: all problems have the same length."""
        return self

    def validation(self, limit: int) -> list[Problem]:
        return [self.problem_of(digits) for digits in self._held_out][:limit]

    @cached_property
    def _held_out(self) -> dict[str, None]:
        source = random.Random(f"held-out/{self.num_digits}")
        digits: dict[str, None] = {}
        while len(digits) < min(self.HELD_OUT, 10**self.num_digits // 4):
            digits[self._draw(source)] = None
        return digits

    def _draw(self, source: random.Random) -> str:
        return "".join(source.choices("0123456789", k=self.num_digits))


def _mistake(answer: str) -> str:
    """Swap the first two adjacent digits that differ."""
    for place in range(len(answer) - 1):
        if answer[place] != answer[place + 1]:
            return answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]
    return answer[:-1] + str((int(answer[-1]) + 1) % 10)


@dataclass(frozen=True)
class ReasoningGym:
    """Problems of one reasoning-gym task. A hash of the question decides whether it is held out, so that even a task
    with few questions never trains on held-out ones."""

    config: DataConfig
    seed: int
    fits: Callable[[Problem], bool] = lambda problem: True

    DRAWS = 1000
    """Maximum number of draws for one problem: a task with few questions repeats itself."""

    def problem(self, position: int) -> Problem:
        """Return the problem at a position; seed and position determine it. Raises DataError: the task fails, or yields
        no training problem."""
        fraction = self.config.validation_fraction
        for draw in range(self.DRAWS):
            problem = self._draw(f"{self.seed}/{position}/{draw}")
            if not is_held_out(problem, fraction) and self.fits(problem):
                return problem
        raise DataError(
            f"data.task = {self.config.task}: {self.DRAWS} draws gave no problem to train on: all are held out "
            f"(data.validation_fraction = {fraction}) or too long"
        )

    def finite(self) -> Sequence[Problem]:
        return ()

    def only(self, fits: Callable[[Problem], bool]) -> Self:
        return replace(self, fits=fits)

    def validation(self, limit: int) -> list[Problem]:
        """Return at most `limit` distinct held-out problems."""
        fraction = self.config.validation_fraction
        found: dict[str, Problem] = {}
        draw = last = 0
        while fraction and len(found) < limit and draw - last < self.DRAWS / fraction:
            problem = self._draw(f"held-out/{draw}")
            draw += 1
            question = problem.messages[-1]["content"]
            if question not in found and is_held_out(problem, fraction):
                found[question], last = problem, draw
        return list(found.values())

    def _draw(self, seed: str) -> Problem:
        from reasoning_gym.factory import create_dataset

        task, arguments = self.config.task or "", self.config.task_kwargs
        try:
            # Some tasks generate all entries at once, so ask for a dataset of one.
            entry = create_dataset(task, **arguments, seed=random.Random(seed).getrandbits(31), size=1)[0]
        except Exception as error:  # tasks check arguments with assertions and may raise anything
            cause = f"{type(error).__name__}: {error}"
            raise DataError(f"data.task = {task} with data.task_kwargs = {dict(arguments)}: {cause}") from None
        # Tasks that accept many answers have none in the entry.
        answer = self.config.answer_column or ""
        row = {**entry, answer: entry.get(answer) or ""}
        problem = to_problem(self.config, row, f"data.task = {task}")
        return replace(problem, metadata={"task": task, "task_kwargs": arguments, "entry": entry})


def unknown_task(name: str) -> str | None:
    """Return a hint if reasoning-gym has no such task, else None."""
    from reasoning_gym.factory import DATASETS

    return None if name in DATASETS else _hint(name, list(DATASETS))


def unknown_arguments(task: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a hint for each name in `arguments` that the task does not take."""
    from reasoning_gym.factory import DATASETS

    # The launcher sets seed and size.
    known = [field.name for field in fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
    return {name: _hint(name, known) for name in arguments if name not in known}


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of: {', '.join(sorted(known))}"


TASKS: dict[str, Callable[[DataConfig, int], Task]] = {
    "reverse_digits": lambda config, seed: ReverseDigits(
        **config.task_kwargs, seed=seed, system_prompt=config.system_prompt
    ),
    "reasoning_gym": ReasoningGym,
}
