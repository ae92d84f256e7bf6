"""Load what `data.name` selects: rows of files and hub datasets, or generated tasks."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from nemo_rl_lite.config.schema import DataConfig
from nemo_rl_lite.data.columns import find_column
from nemo_rl_lite.data.formats import Example, RowFormat
from nemo_rl_lite.data.gym import ReasoningGym
from nemo_rl_lite.data.problems import Derived, FileSet, LeftOut, Problem, Prompted, TrainingSet, is_held_out
from nemo_rl_lite.data.reverse_digits import ReverseDigits
from nemo_rl_lite.data.rows import Row, file_rows, hub_rows, share_a_file
from nemo_rl_lite.errors import DataError

log = logging.getLogger(__name__)


class Task(TrainingSet[Problem], Protocol):
    """A generated training set that also generates its held-out problems."""

    def validation(self, limit: int) -> list[Problem]: ...


TASKS: dict[str, Callable[[DataConfig, int], Task]] = {
    "reverse_digits": lambda config, seed: ReverseDigits(
        **config.task_kwargs, seed=seed, system_prompt=config.system_prompt
    ),
    "reasoning_gym": ReasoningGym,
}
ROWS = ("file", "hub")


def training_set[T: Prompted](config: DataConfig, seed: int, kind: RowFormat[T]) -> TrainingSet[T]:
    """Return what a configuration trains on, shuffled or generated from `seed`.

    Raises:
        DataError: a row cannot be read; the error names file, row and cause.
    """
    if config.name in TASKS:
        return Derived(TASKS[config.name](config, seed), kind.from_problem)
    problems = _used(config, _training_rows(config), kind)
    fraction = config.validation_fraction
    kept = tuple(problem for problem in problems if not is_held_out(problem, fraction))
    if not kept:
        raise DataError(_empty(config.train_path or config.path, problems, "to train on", fraction))
    return FileSet(kept, seed, config.shuffle)


def validation_set[T: Prompted](
    config: DataConfig, limit: int, kind: RowFormat[T], training: Sequence[T] = ()
) -> list[T]:
    """Return at most `limit` held-out items, always the same ones; none where the configuration holds nothing out. A
    warning says how many of them are among the `training` items.

    Raises:
        DataError: a row cannot be read; the error names file, row and cause.
    """
    fraction = config.validation_fraction
    if config.name in TASKS:
        return list(map(kind.from_problem, TASKS[config.name](config, 0).validation(limit)))
    if validation_source(config) is not None:
        if (
            config.name == "file"
            and config.train_path
            and share_a_file(config.train_path, config.validation_path or "")
        ):
            log.warning("data.validation_path has a file of data.train_path: validation is on what was trained on")
            training = ()
        split, path = config.validation_split or "", config.validation_path or ""
        source = hub_rows(config, split, "data.validation_split") if config.name == "hub" else file_rows(path)
        rows = list(islice(source, limit))
        if not rows:
            raise DataError(f"{validation_source(config)}: no rows")
        held_out = _used(config, rows, kind)
        trained = {_said(one) for one in training}
        if count := sum(_said(one) in trained for one in held_out):
            rule = "rows for validation are trained on, too"
            log.warning("%s: %d of the %d %s", validation_source(config), count, len(held_out), rule)
        return held_out
    if not fraction:
        return []
    problems, _ = _read(config, _training_rows(config), kind)
    held_out = [problem for problem in problems if is_held_out(problem, fraction)]
    if not held_out:
        raise DataError(_empty(config.train_path or config.path, problems, "held out", fraction))
    return held_out[:limit]


def validation_source(config: DataConfig) -> str | None:
    """Return the file or split that holds the validation problems, or None."""
    return config.validation_path if config.name == "file" else config.validation_split


def check_file(config: DataConfig, path: str, limit: int, kind: RowFormat) -> None:
    """Read the first `limit` rows of a file. Raises DataError: a row is not of this kind, or there are none."""
    rows = list(islice(file_rows(path), limit))
    if not rows:
        raise DataError(f"{path}: no rows")
    _read(config, rows, kind, all_rows=len(rows) < limit)


def _read[T: Prompted](
    config: DataConfig, rows: Iterable[tuple[str, Row]], kind: RowFormat[T], all_rows: bool = True
) -> tuple[list[T], Counter[LeftOut]]:
    """Turn rows into items of this kind; how many are left out, and why. `all_rows`: there are no others.

    Raises:
        DataError: a row cannot be read, or none of all rows is left.
    """
    found, first, tools = [], "", config.tools_column
    has_tools = False
    for where, row in rows:
        first = first or where
        found.append(kind.from_row(config, row, where))
        has_tools = has_tools or tools is None or tools in row or find_column(row, tools) is not None
    if found and not has_tools:
        raise DataError(f"{config.train_path or config.path}: no row has the column '{tools}' (data.tools_column)")
    kept = [one for one in found if not isinstance(one, LeftOut)]
    left_out = Counter(one for one in found if isinstance(one, LeftOut))
    if found and not kept and all_rows:
        whys = " and ".join(f"{count} {why}" for why, count in left_out.items())
        raise DataError(f"{first} and the {len(found) - 1} after it are all left out: {whys}")
    return kept, left_out


def _used[T: Prompted](config: DataConfig, rows: Iterable[tuple[str, Row]], kind: RowFormat[T]) -> list[T]:
    """Turn rows into items of this kind. A warning says how many are left out."""
    kept, left_out = _read(config, rows, kind)
    for why, count in left_out.items():
        log.warning("%d of %d rows %s and were left out", count, len(kept) + left_out.total(), why)
    return kept


def _said(one: Prompted) -> tuple[str, ...]:
    """Return what a row asks, and what it answers."""
    answers = [one.answer] if isinstance(one, Problem) else []
    trained = [each.messages[each.first_trained :] for each in one.conversations] if isinstance(one, Example) else []
    return tuple(message["content"] for said in (one.messages, *trained) for message in said) + tuple(answers)


def _training_rows(config: DataConfig) -> Iterator[tuple[str, Row]]:
    if config.name == "hub":
        return hub_rows(config, config.train_split, "data.train_split")
    if config.train_path is None:
        raise DataError("data.train_path is null: name a file")
    return file_rows(config.train_path)


def _empty(source: str | None, problems: Sequence[Prompted], what: str, fraction: float) -> str:
    if not problems:
        return f"{source}: no rows"
    different = len({str(problem.messages) for problem in problems})
    together = f"rows with equal prompts go together; different prompts: {different}"
    return (
        f"{source}: none of the {len(problems)} rows is {what} with data.validation_fraction = {fraction} ({together})"
    )
