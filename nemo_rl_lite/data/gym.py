"""Tasks of the reasoning-gym package generate problems without end. Making a task imports the package."""

import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from nemo_rl_lite.config.schema import DataConfig
from nemo_rl_lite.data.columns import to_problem
from nemo_rl_lite.data.problems import Problem, is_held_out
from nemo_rl_lite.errors import DataError

# A task with few questions repeats itself, so a draw may have to be retried; this many retries mean an error.
DRAWS = 1000
# The launcher itself sets these arguments of every task.
_OWNED = ("seed", "size")


@dataclass(frozen=True)
class ReasoningGym:
    """Problems of one task. A hash of the question decides whether it is held out, so a task with few questions does
    not train on held-out ones either.
    """

    config: DataConfig
    seed: int
    fits: Callable[[Problem], bool] = lambda problem: True

    def problem(self, position: int) -> Problem:
        """Return the problem at a position: the same one for the same seed.

        Raises:
            DataError: the task fails, or yields no problem to train on.
        """
        fraction = self.config.validation_fraction
        for draw in range(DRAWS):
            problem = self._draw(f"{self.seed}/{position}/{draw}")
            if not is_held_out(problem, fraction) and self.fits(problem):
                return problem
        raise DataError(
            f"data.task = {self.config.task}: {DRAWS} draws gave no problem to train on: all are held out "
            f"(data.validation_fraction = {fraction}) or too long"
        )

    def finite(self) -> Sequence[Problem]:
        return ()

    def only(self, fits: Callable[[Problem], bool]) -> Self:
        return replace(self, fits=fits)

    def validation(self, limit: int) -> list[Problem]:
        """Return at most `limit` different held-out problems; fewer where the task has few questions."""
        fraction = self.config.validation_fraction
        found: dict[str, Problem] = {}
        draw = last = 0
        while fraction and len(found) < limit and draw - last < DRAWS / fraction:
            problem = self._draw(f"held-out/{draw}")
            draw += 1
            question = problem.messages[-1]["content"]
            if question not in found and is_held_out(problem, fraction):
                found[question], last = problem, draw
        return list(found.values())

    def _draw(self, seed: str) -> Problem:
        task, arguments = self.config.task or "", self.config.task_kwargs
        entry = draw_entry(task, arguments, random.Random(seed).getrandbits(31))
        # Tasks that accept many answers have none in the entry.
        answer = self.config.answer_column or ""
        row = {**entry, answer: entry.get(answer) or ""}
        problem = to_problem(self.config, row, f"data.task = {task}")
        return replace(problem, metadata={"task": task, "task_kwargs": arguments, "entry": entry})


def draw_entry(task: str, arguments: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the task's entry (question, answer, metadata) for a seed, from a data set of one entry, because some tasks
    generate all entries at once.

    Raises:
        DataError: the task does not take the arguments, or fails.
    """
    from reasoning_gym.factory import create_dataset

    try:
        return create_dataset(task, **arguments, seed=seed, size=1)[0]
    except Exception as error:  # a task checks its arguments by assertions, and may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise DataError(f"data.task = {task} with data.task_kwargs = {dict(arguments)}: {cause}") from None


def nearest_task(name: str) -> str | None:
    """Return None where the task exists, else a hint at similar names."""
    from reasoning_gym.factory import DATASETS

    return None if name in DATASETS else _hint(name, list(DATASETS))


def unknown_arguments(task: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a hint for each name in `arguments` that the task does not take."""
    from reasoning_gym.factory import DATASETS

    known = [field.name for field in fields(DATASETS[task][1]) if field.name not in _OWNED]
    return {name: _hint(name, known) for name in arguments if name not in known}


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of: {', '.join(sorted(known))}"
