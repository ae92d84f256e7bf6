"""What the built-in rewards need of the rows, looked at before a run starts anything."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from nemo_rl_lite.config.sections.data import RewardConfig
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.rewards.program import passes_tests
from nemo_rl_lite.rewards.program_tests import read_tests
from nemo_rl_lite.rewards.terms import Term, terms_of

# The number of problems that are looked at, and the number of them for which a program is run.
_LOOKED_AT, _RUN = 500, 3
# Four words in a row are a sentence; LaTeX's commands and short answers ("no solution") are not.
_SENTENCE = re.compile(r"(?:(?<![\\\w])[A-Za-z]{2,}[,;:]?\s+){3}[A-Za-z]{2,}")
_NUMBER = re.compile(r"[-+\N{MINUS SIGN}]?[\d,]*\.?\d+(?:[eE][-+]?\d+)?")


def check_rows(config: RewardConfig, training: TrainingSet[Problem]) -> None:
    """Note answers and tests of rows that a built-in reward cannot use.

    Raises:
        DataError: of the rows, more than `reward.max_error_share` cannot be judged, or any program would pass.
    """
    problems = list(islice(training.finite(), _LOOKED_AT)) or [training.problem(0)]
    for term in terms_of(config):
        if term.name == "program":
            _check_tests(term, problems, config.max_error_share)
        for rule in _found(term, problems):
            sys.stderr.write(f"note: {term.section}.name = {term.name}: {rule}\n")


def _check_tests(term: Term, problems: Sequence[Problem], most_failing: float) -> None:
    column = str(term.kwargs.get("tests_column", "tests"))
    failing: list[str] = []
    judged: list[Problem] = []
    for problem in problems:
        try:
            read_tests(problem.metadata, column)
            judged.append(problem)
        except ValueError as error:
            failing.append(f"{error} (the row that asks {_shown(problem)})")
    if failing:
        rule = f"{len(failing)} of {len(problems)} rows cannot be judged, such as: {failing[0]}"
        if len(failing) > most_failing * len(problems):
            fix = f"write tests into {term.section}.kwargs.tests_column = {column}, or leave such rows out"
            raise DataError(f"{term.section}.name = program: {rule}. Fix: {fix}")
        sys.stderr.write(f"note: {term.section}.name = program: {rule}; their samples are left out\n")
    for problem in judged[:_RUN]:
        if passes_tests("", "", problem, column):
            rule = f"an empty program passes the tests in the column {column} of the row that asks {_shown(problem)}"
            fix = "tests must call what the program defines, and assert what it returns"
            raise DataError(f"{term.section}.name = program: {rule}. Fix: {fix}")


def _found(term: Term, problems: Sequence[Problem]) -> Iterator[str]:
    """What is odd about the answers, for the term."""
    cut = "data.answer_pattern cuts the answer out of a longer text"
    wanted: dict[str, tuple[str, Callable[[str], bool]]] = {
        "math": (f"is a sentence, and what counts is the expression at its end, such as {{}}; {cut}", _is_sentence),
        "last_number": (
            f"is no number, and such samples are left out, such as {{}}; {cut}",
            lambda text: not _NUMBER.fullmatch(text),
        ),
        "exact_match": ("is empty, so that only an empty response is right", lambda text: not text),
    }
    if term.name in wanted:
        rule, is_odd = wanted[term.name]
        odd = [problem.answer for problem in problems if is_odd(problem.answer.strip())]
        # Where no row has an answer, the environment judges.
        if odd and any(problem.answer for problem in problems):
            shown = rule.format(repr(odd[0][-60:]))
            yield f"the answer of {len(odd)} of {len(problems)} rows {shown}"


def _is_sentence(answer: str) -> bool:
    return not any(mark in answer for mark in ("\\boxed", "\\text")) and _SENTENCE.search(answer) is not None


def _shown(problem: Problem) -> str:
    return f"{problem.messages[-1]['content']!r:.60}"
