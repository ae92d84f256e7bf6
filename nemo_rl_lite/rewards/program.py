"""The response is a Python program, and tests of the row judge it."""

from dataclasses import replace
from itertools import chain

from markdown_it import MarkdownIt

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.host.sandbox import Limits, run_python
from nemo_rl_lite.rewards.program_tests import Assertions, Test, read_tests

# Bytes of output that are compared in addition to twice the expected ones: blanks at the ends of lines do not count.
_BLANKS = 10_000


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

    The program is the last fenced code block of the response that is in Python, or without one the last that names no
    language, or without fences the whole response. Tests are in the row's column `tests_column`, see `read_tests`;
    standard output is compared, without blanks at the ends of lines.

    Raises:
        ValueError: the row has no tests, or they cannot be read or would pass any program.
    """
    program, tests = _program(response), read_tests(problem.metadata, tests_column)
    limits, passed = Limits(seconds, memory_mib), 0
    for test in tests:
        if _passes(program, test, limits):
            passed += 1
        elif not share:
            return 0.0
    return passed / len(tests)


def _program(response: str) -> str:
    # No tag, such as </think>, and no indentation hides a fence.
    blocks = MarkdownIt().disable(["html_block", "code"]).parse(response)
    fences = [(one.info.strip().lower(), one.content) for one in blocks if one.type == "fence"]
    in_python = [code for language, code in fences if language.startswith("py")]
    unnamed = [code for language, code in fences if not language]
    return next(chain(reversed(in_python), reversed(unnamed)), response)


def _passes(program: str, test: Test, limits: Limits) -> bool:
    if isinstance(test, Assertions):
        # A program that exits before the tests passes none.
        return run_python(program, test.code, limits=limits).is_complete
    most = 2 * len(test.expected.encode()) + _BLANKS
    ran = run_python(program, stdin=test.given, limits=replace(limits, output=most), errors=False)
    return ran.status == 0 and _lines(ran.output) == _lines(test.expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
