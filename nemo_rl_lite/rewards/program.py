"""The response is a Python program, and tests of the row judge it."""

import re

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.host.sandbox import Limits, run_python
from nemo_rl_lite.rewards.program_tests import Assertions, Test, read_tests

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
    the row's column `tests_column`, see `read_tests`; outputs are compared without blanks at the ends of lines.

    Raises:
        ValueError: the row has no tests, or they cannot be read or would pass any program.
    """
    blocks = _BLOCK.findall(response)
    program, limits = blocks[-1] if blocks else response, Limits(seconds, memory_mib)
    tests = read_tests(problem.metadata, tests_column)
    passed = 0
    for test in tests:
        if _passes(program, test, limits):
            passed += 1
        elif not share:
            return 0.0
    return passed / len(tests)


def _passes(program: str, test: Test, limits: Limits) -> bool:
    if isinstance(test, Assertions):
        # A program that exits before the tests passes none.
        return run_python(program, test.code, limits=limits).is_complete
    ran = run_python(program, stdin=test.given, limits=limits)
    return ran.status == 0 and _lines(ran.output) == _lines(test.expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
