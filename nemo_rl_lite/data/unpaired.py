"""Read single responses that are desirable or not, for KTO. This module imports nothing heavy.

A row has a prompt, a completion (each text or messages) and a label, true or false, as TRL has them.
"""

import zlib
from dataclasses import replace

from nemo_rl_lite.config.sections.data import DataConfig
from nemo_rl_lite.data.columns import column, shown_columns
from nemo_rl_lite.data.conversations import Example
from nemo_rl_lite.data.messages import read_messages
from nemo_rl_lite.data.pairs import ending_with_the_assistant, pair_of
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.data.rows import Row
from nemo_rl_lite.errors import DataError

_USUAL_COLUMN = "completion"


def to_labelled(config: DataConfig, row: Row, where: str) -> Example:
    """Return the response of a row with its label; `where` names the row in errors.

    Raises:
        DataError: the row lacks a column, or one has a wrong type.
    """
    name = config.response_column or _USUAL_COLUMN
    if name not in row or config.label_column not in row:
        pair = {config.chosen_column, config.rejected_column} <= row.keys()
        hint = "; pairs are for algorithm=dpo or orpo" if pair else ""
        needed = f"'{config.prompt_column}', '{name}' and '{config.label_column}'"
        raise DataError(f"{where}: no labelled response (needed: {needed}; columns: {shown_columns(row)}){hint}")
    asked = chat(column(row, config.prompt_column, where), config.system_prompt, where)
    value = column(row, name, where)
    response = ({"role": "assistant", "content": value},) if isinstance(value, str) else read_messages(value, where)
    said = ending_with_the_assistant((*asked, *response), len(asked), where)
    return Example((said,), where, label=_label(row[config.label_column], config.label_column, where))


def labelled_of(problem: Problem) -> Example:
    """Return a task's problem with its answer, or with its `mistake`: one of the two, which the problem's text decides.
    Raises DataError: the task has no mistakes."""
    right, wrong = pair_of(problem).conversations
    desirable = zlib.crc32(str(problem.messages).encode()) % 2 == 0
    return replace(pair_of(problem), conversations=(right if desirable else wrong,), label=desirable)


def _label(value: object, name: str, where: str) -> bool:
    if value not in (0, 1):
        raise DataError(f"{where}: column '{name}' must be true or false, found {value!r}")
    return bool(value)
