"""Turn a row into a problem: by the prompt column or template, the answer column and its pattern."""

import re
from collections.abc import Mapping
from math import isfinite
from string import Formatter
from typing import Any, TypeGuard

from nemo_rl_lite.config.schema import DataConfig
from nemo_rl_lite.data.messages import CHAT_COLUMNS
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.data.rows import Row
from nemo_rl_lite.errors import DataError

_WITH_COMMAS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


class MissingColumnError(DataError):
    """A row has no column of this name."""

    def __init__(self, message: str, name: str):
        super().__init__(message)
        self.name = name


def to_problem(config: DataConfig, row: Row, where: str) -> Problem:
    """Return the problem of a row; `where` names the row in errors.

    Raises:
        DataError: the row lacks a column, or one has a wrong type or does not match `data.answer_pattern`.
    """
    if config.prompt_template is not None:
        prompt = filled(config.prompt_template, row, where)
    elif config.prompt_column not in row and (chats := [name for name in CHAT_COLUMNS if name in row]):
        rule = f"no column '{config.prompt_column}', but '{chats[0]}', as of whole chats: algorithm=sft trains on those"
        raise DataError(f"{where}: {rule}")
    else:
        prompt = column(row, config.prompt_column, where)
    answer = _text(row, config.answer_column, where) if config.answer_column is not None else ""
    if config.answer_pattern is not None:
        found = re.search(config.answer_pattern, answer)
        if not found or found[1] is None:
            rule = f"data.answer_pattern is not in column '{config.answer_column}', which ends {answer[-60:]!r}"
            raise DataError(f"{where}: {rule}")
        answer = found[1].strip()
        answer = answer.replace(",", "") if _WITH_COMMAS.fullmatch(answer) else answer
    if answer.isspace() or (not answer and config.answer_pattern is not None):
        raise DataError(f"{where}: the answer in column '{config.answer_column}' is nothing but blanks")
    return Problem(chat(prompt, config.system_prompt, where), answer, row)


def template_columns(template: str) -> list[str]:
    """Return the columns that a template names, in order.

    Raises:
        ValueError: braces do not match, or a field is not just a column's name.
    """
    columns = []
    for _, name, specification, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name or specification or conversion or any(mark in name for mark in ".["):
            raise ValueError(f"the field {name!r} is more, or less, than a column's name")
        columns.append(name)
    return columns


def filled(template: str, row: Row, where: str) -> str:
    """Replace each field of the template by its column. str.format would also reach into attributes.

    Raises:
        DataError: the row has no such column, or it is neither text nor a number.
    """
    return "".join(
        text + ("" if name is None else _text(row, name, where)) for text, name, _, _ in Formatter().parse(template)
    )


def column(row: Row, name: str, where: str) -> object:
    """Return the value of a column. Raises MissingColumnError: there is none. Raises DataError: it is null."""
    value = find_column(row, name)
    if value is None and name in row:
        raise DataError(f"{where}: column '{name}' is null")
    if value is None:
        raise MissingColumnError(f"{where}: no column '{name}' (columns: {shown_columns(row)})", name)
    return value


def find_column(row: Row, name: str) -> Any:
    """Return the value of a column, or of a field of a structure, `column.field`; None where there is none."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def shown_columns(row: Row) -> str:
    """Return the names of a row's columns, each with the fields of a structure in it."""
    return ", ".join(
        f"{name} {{{', '.join(map(str, value))}}}" if isinstance(value, Mapping) else name
        for name, value in row.items()
    )


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number. True and false are none, nor is what is not finite."""
    return isfinite(value) if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)


def _text(row: Row, name: str, where: str) -> str:
    value = column(row, name, where)
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        fields = ", ".join(map(str, value))
        raise DataError(f"{where}: column '{name}' must be text or a number, not a structure (its fields: {fields})")
    if not is_number(value):
        found = f"{value!r:.80}"
        raise DataError(f"{where}: column '{name}' must be text or a number, found {found}")
    # Parquet and pandas make 7.0 of a 7 in a column that has gaps.
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return str(int(value) if whole else value)
