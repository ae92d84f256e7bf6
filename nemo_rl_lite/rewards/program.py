"""Reward for a Python program: run the row's tests on it in a sandbox."""

import ast
import builtins
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from markdown_it import MarkdownIt

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.rewards.answers import final_text
from nemo_rl_lite.system.sandbox import Limits, passes, run_python

# Statements that run their bodies.
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.match_case, ast.ExceptHandler)
_INPUTS, _OUTPUTS = ("input", "inputs"), ("output", "outputs")
# Extra bytes of output to compare: whitespace at line ends does not count.
_BLANKS = 10_000


@dataclass(frozen=True)
class Assertions:
    """Python code that runs after the program, and raises if the program is wrong."""

    code: str


@dataclass(frozen=True)
class Printed:
    """Standard input of the program, and its expected output."""

    given: str
    expected: str


Test = Assertions | Printed


def read_tests(row: Mapping[str, Any], column: str) -> list[Test]:
    """Return the tests in a row's column: assertions as text, an `input` with its `output`, or a list of these.

    The column may be JSON text, or have the lists `inputs` and `outputs` (APPS). If the text only defines `check`, a
    call with the row's `entry_point` is added (HumanEval).

    Raises:
        ValueError: there are no tests, or one cannot be read, or would pass any program.
    """
    found = row.get(column)
    if isinstance(found, str) and found.lstrip().startswith(("[", "{")):
        with suppress(ValueError):
            found = json.loads(found)
    if isinstance(found, Mapping):
        found = _pairs(found, column)
    tests = [found] if isinstance(found, str) else found
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"the row has no tests in its column {column}")
    return [_test(test, column, row.get("entry_point")) for test in tests]


def _pairs(found: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """Split a structure with lists of inputs and outputs into tests; any other structure is one test."""
    if found.get("fn_name"):
        rule = f"calls the function {found['fn_name']} (fn_name); write assertions, or standard input and output"
        raise ValueError(f"a test of the column {column} {rule}")
    inputs, outputs = (next((found[name] for name in names if name in found), None) for names in (_INPUTS, _OUTPUTS))
    if "outputs" not in found and not (isinstance(inputs, list) and isinstance(outputs, list)):
        return [dict(found)]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"the column {column} does not have one output per input")
    return [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]


def _test(test: Any, column: str, entry_point: Any) -> Test:
    if isinstance(test, str):
        return Assertions(_calling(test, column, entry_point))
    if isinstance(test, Mapping) and "output" in test:
        return Printed(_text(test.get("input", ""), test, column), _text(test["output"], test, column))
    raise ValueError(f"a test of the column {column} is neither a text nor has an output: {test!r:.80}")


def _text(value: Any, test: Any, column: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(line.removesuffix("\n") for line in value)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    rule = "has an input or an output that is neither a text, nor a number, nor a list of lines"
    raise ValueError(f"a test of the column {column} {rule}: {test!r:.80}")


def _calling(code: str, column: str, entry_point: Any) -> str:
    """Return the code, with a call of its function `check` if it calls nothing itself."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"a test of the column {column} is not valid Python ({error}): {code!r:.80}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if any(ast.unparse(call.func) == "unittest.main" for call in calls):
        rule = "calls unittest.main, which exits before the last line, so no program would pass; write assertions"
        raise ValueError(f"a test of the column {column} {rule}")
    if _checks_something(tree.body):
        return code
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    if "check" in defined and isinstance(entry_point, str) and entry_point.isidentifier():
        return f"{code}\n\ncheck({entry_point})\n"
    rule = f"defines {' and '.join(defined)}, and nothing calls it" if defined else "asserts nothing"
    raise ValueError(f"a test of the column {column} {rule}, so any program would pass: {code!r:.80}")


def _checks_something(statements: list[ast.stmt]) -> bool:
    """Return True if the statements assert, raise or call something when they run."""
    for statement in statements:
        if isinstance(statement, ast.Assert | ast.Raise):
            return True
        if isinstance(statement, ast.Expr | ast.Assign) and isinstance(statement.value, ast.Call):
            return True
        if isinstance(statement, _BLOCKS):
            inner = chain.from_iterable(getattr(statement, part, ()) for part in ("body", "orelse", "finalbody"))
            inner = [*inner, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
            if _checks_something(inner):
                return True
    return False


def passes_tests(
    response: str,
    answer: str,
    problem: Problem,
    tests_column: str = "tests",
    seconds: float = 10.0,
    memory_mib: int = 1024,
    share: bool = False,
) -> float:
    """Return 1 if the program passes all tests, else 0; with `share`, the share of passed tests.

    The program is the last Python code block after the reasoning, or else the last block without a language, or else
    the whole text. `read_tests` reads the tests from the row's column `tests_column`. Comparing output ignores
    whitespace at line ends.

    Raises:
        ValueError: the row has no tests, or they cannot be read, or would pass any program.
    """
    tests, final = read_tests(problem.metadata, tests_column), final_text(response)
    if final is None:
        return 0.0
    program = _program(final)
    limits, passed = Limits(seconds, memory_mib), 0
    for test in tests:
        if _passes(program, test, limits):
            passed += 1
        elif not share:
            return 0.0
    return passed / len(tests)


def _program(response: str) -> str:
    # HTML tags and indentation must not hide a fence.
    blocks = MarkdownIt().disable(["html_block", "code"]).parse(response)
    fences = [(one.info.strip().lower(), one.content) for one in blocks if one.type == "fence"]
    in_python = [code for language, code in fences if language.startswith("py")]
    unnamed = [code for language, code in fences if not language]
    return next(chain(reversed(in_python), reversed(unnamed)), response)


def _passes(program: str, test: Test, limits: Limits) -> bool:
    if isinstance(test, Assertions):
        # A program that exits early passes no test.
        return passes(program, test.code, limits, is_apart(test.code))
    most = 2 * len(test.expected.encode()) + _BLANKS
    ran = run_python(program, stdin=test.given, limits=replace(limits, output=most), errors=False)
    return ran.status == 0 and _lines(ran.output) == _lines(test.expected)


# Modules that tests may import and still run in a separate process. Objects of other packages are not copied.
_COPIED = frozenset({*sys.stdlib_module_names, "numpy", "pytest"})
# Modules and names with which tests inspect or change their process.
_OWN_PROCESS = (
    "builtins inspect asyncio importlib gc mock patch monkeypatch __main__ globals locals vars exec eval input stdin "
    "argv modules _getframe seed"
)


def is_apart(code: str) -> bool:
    """Return whether tests can run in a separate process from the program, which exchanges values and calls."""
    tree, own_process = ast.parse(code), set(_OWN_PROCESS.split())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | vars(builtins).keys()
    # Variables may have such names, for example `input`.
    variables = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    variables |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import() | ast.ImportFrom():
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                defined |= {one.asname or one.name for one in node.names}
                if not {one.partition(".")[0] for one in modules} <= _COPIED:
                    return False
                names = [*".".join(modules).split("."), *(one.name for one in node.names)]
            case ast.Name() if node.id not in variables:
                names = [node.id]
            case ast.Attribute():
                names = [node.attr] if node.attr not in vars(builtins) else []
                if node.attr.startswith("__") and node.attr not in ("__name__", "__class__"):
                    return False
            case ast.ClassDef():
                if not all(isinstance(one, ast.Attribute) or getattr(one, "id", "") in defined for one in node.bases):
                    return False
            case ast.AsyncFunctionDef() | ast.Await():
                return False
        if not own_process.isdisjoint(names):
            return False
    return True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
