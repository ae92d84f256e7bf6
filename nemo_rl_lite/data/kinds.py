"""A `Kind` is what an algorithm trains on and how it is read. This module imports nothing heavy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nemo_rl_lite.config.algorithms import algorithm_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.data import DataConfig
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.data.columns import to_problem
from nemo_rl_lite.data.conversations import Example, chat_of, to_chat
from nemo_rl_lite.data.pairs import pair_of, to_pair
from nemo_rl_lite.data.problems import Asked, LeftOut, Problem
from nemo_rl_lite.data.rows import Row
from nemo_rl_lite.data.tools import Tool, callable_tools, row_tools
from nemo_rl_lite.data.unpaired import labelled_of, to_labelled


@dataclass(frozen=True)
class Kind[T: Asked]:
    """`name` is a plural. `from_row` reads one example from a row, which its text argument names in errors, or says
    why it is left out; `from_problem` makes one from a task's problem."""

    name: str
    from_row: Callable[[DataConfig, Row, str], T | LeftOut]
    from_problem: Callable[[Problem], T]
    reads_answers: bool = False
    """Whether `data.answer_pattern` finds the answers of its rows."""


def problems(tools: Sequence[Tool] = ()) -> Kind[Problem]:
    """Problems that offer `tools`, unless their rows have some of their own."""

    def from_row(config: DataConfig, row: Row, where: str) -> Problem:
        own = callable_tools(row_tools(config, row, where), f"{where}, column '{config.tools_column}'")
        return replace(to_problem(config, row, where), tools=own or tuple(tools))

    def from_problem(problem: Problem) -> Problem:
        return replace(problem, tools=tuple(tools))

    return Kind("problems", from_row, from_problem, reads_answers=True)


PROBLEMS = problems()
CHATS = Kind[Example]("chats", to_chat, chat_of)
PAIRS = Kind[Example]("pairs", to_pair, pair_of)
UNPAIRED = Kind[Example]("labelled responses", to_labelled, labelled_of)
# Those that a task has only where it knows a wrong answer to each problem.
OF_MISTAKES = (PAIRS, UNPAIRED)


def kind_of(config: Config) -> Kind:
    """Return what the configuration's algorithm trains on."""
    return imported(algorithm_of(config).data)
