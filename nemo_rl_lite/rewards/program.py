"""The response is a Python program, and tests of the row judge it."""

import re
from typing import Any

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.host.sandbox import Limits, run_python

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def passes_tests(
    response: str,
    answer: str,
    problem: Problem,
    tests_column: str = "tests",
    seconds: float = 10.0,
    memory_mib: int = 1024,
    share: bool = False,
) -> float:
    """Return 1 where the program passes all tests, else 0; with `share`, the share of the tests that it passes.

    The program is the last fenced code block of the response, or the whole response where there is none. Tests are in
    the row's column `tests_column`: a text of assertions that follow the program, or a list whose items are such texts
    or have an `input` for standard input and the expected `output`, compared without blanks at the ends of lines.

    Raises:
        ValueError: the row has no tests that can be read.
    """
    blocks = _BLOCK.findall(response)
    program, limits = blocks[-1] if blocks else response, Limits(seconds, memory_mib)
    tests = _tests(problem.metadata.get(tests_column), tests_column)
    passed = 0
    for test in tests:
        if _passes(program, test, limits):
            passed += 1
        elif not share:
            return 0.0
    return passed / len(tests)


def _passes(program: str, test: Any, limits: Limits) -> bool:
    if isinstance(test, str):
        # A program that exits before the tests passes none.
        return run_python(program, test, limits=limits).is_complete
    ran = run_python(program, stdin=str(test.get("input", "")), limits=limits)
    return ran.status == 0 and _lines(ran.output) == _lines(str(test["output"]))


def _tests(found: Any, column: str) -> list[Any]:
    tests = [found] if isinstance(found, str) else found
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"the row has no tests in its column {column}")
    for test in tests:
        if not isinstance(test, str) and not (isinstance(test, dict) and "output" in test):
            raise ValueError(f"a test of the column {column} is neither a text nor has an output: {test!r:.80}")
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
