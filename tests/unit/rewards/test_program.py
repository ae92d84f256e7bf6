"""Programs are judged by what they do, within limits, and cannot exit their way past the tests."""

import json

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.rewards.program import is_apart, passes_tests

DOUBLE = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."


def judged(response: str, tests, **kwargs) -> float:
    return passes_tests(response, "", Problem(chat("?"), "", {"tests": tests}), **kwargs)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (DOUBLE, 1.0),
        ("def double(x): return 2 * x", 1.0),
        ("```text\n2 -> 4\n```\n" + DOUBLE, 1.0),
        ("```bash\npip install nothing\n```\n" + DOUBLE, 1.0),
        (DOUBLE.replace("python", ""), 1.0),
        (DOUBLE + "\nIt prints\n```\n4\n```", 1.0),
        ("- first\n\n  ```python\n  def double(x):\n      return 2 * x\n  ```", 1.0),
        ("<think>\n```python\nwrong\n```\n</think>\n" + DOUBLE.partition(":\n")[2], 1.0),
        ("    ```python\n    def double(x):\n        return 2 * x\n    ```", 1.0),
        ("<think>\n" + DOUBLE + "\n</think>\nI do not know.", 0.0),
        ("<think>\n" + DOUBLE, 0.0),
        ("```c\nint x;\n```", 0.0),
        (DOUBLE.replace("2 *", "3 *"), 0.0),
        ("```python\nimport sys; sys.exit(0)\n```", 0.0),
        ("```python\ndef double(x): return 2 * x\nraise SystemExit\n```", 0.0),
        ("no program", 0.0),
    ],
)
def test_assertions(response, reward):
    assert judged(response, "assert double(2) == 4\nassert double(0) == 0") == reward


def test_input_and_output_and_the_share_of_tests():
    program = "```python\nprint(int(input()) + 1)  \nprint()\n```"
    tests = [{"input": "1", "output": "2"}, {"input": "5", "output": "7"}]
    assert judged(program, tests) == 0.0 and judged(program, tests, share=True) == 0.5
    assert judged(program, tests[:1]) == 1.0


LONG = 30_000 * "9"


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        (f"print({LONG!r})", 1.0),
        (f"print({LONG!r} + '9')", 0.0),
        (f"import sys; print('debug', file=sys.stderr); print({LONG!r})", 1.0),
        (f"import re; re.compile('\\d'); print({LONG!r})", 1.0),
        (f"import sys; sys.stderr.write({LONG!r})", 0.0),
    ],
)
def test_all_that_is_expected_is_compared_and_nothing_of_standard_error(code, reward):
    assert judged(f"```python\n{code}\n```", [{"input": "", "output": LONG}]) == reward


CHECK = "METADATA = {}\ndef check(candidate):\n    assert candidate(2) == 4\n"
READ = {
    "a list of assertions as JSON": (json.dumps(["assert double(2) == 4", "assert double(3) == 7"]), 0.0),
    "inputs and outputs as JSON": (json.dumps({"inputs": ["4\n"], "outputs": ["8\n"]}), 1.0),
    "inputs and outputs as a structure": ({"input": ["4\n", "5\n"], "output": ["8\n", "9\n"]}, 0.0),
    "lines of output": ([{"input": "4", "output": ["8"]}], 1.0),
    "a check of an entry point": (CHECK, 1.0),
}


@pytest.mark.parametrize("layout", READ)
def test_the_layouts_of_published_data(layout):
    tests, reward = READ[layout]
    program = "def double(x):\n    return 2 * x\nif __import__('sys').stdin.seekable():\n"
    program += "    line = input() if 'inputs' in LAYOUT or 'lines' in LAYOUT else '0'\n    print(double(int(line)))"
    row = {"tests": tests, "entry_point": "double"}
    problem = Problem(chat("?"), "", row)
    assert passes_tests(f"LAYOUT = {layout!r}\n{program}", "", problem) == reward
    assert passes_tests("", "", problem) == 0.0, "an empty program"


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ("", "asserts nothing"),
        ("def test_f():\n    assert f(1) == 99", "defines test_f, and nothing calls it"),
        (CHECK, "defines check"),
        ("import unittest\nclass T(unittest.TestCase):\n    pass\nunittest.main()", "unittest.main"),
        ("print 'hello'", "is not valid Python"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, "calls the function f"),
    ],
)
def test_tests_that_would_pass_any_program_are_refused(tests, words):
    with pytest.raises(ValueError, match=words):
        judged(DOUBLE, tests)


WRONG = "def f(x): return 0\n"
# Claims to be, and to be less than, everything, and to be nothing apart from anything.
ANY = (
    "class Any{base}:\n  __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = lambda *a: True\n"
    "  __ne__ = lambda *a: False\n  __sub__ = __rsub__ = __add__ = lambda a, b: a\n  __abs__ = __hash__ = lambda a: 0\n"
    "  __contains__ = lambda *a: True\n  __iter__ = lambda a: iter([a])\n"
    "def f(x): return Any({value})\n"
)
TRICKS = {
    "sys.exit": WRONG + "import sys; sys.exit()",
    "os._exit": WRONG + "import os; os._exit(0)",
    "os._exit in the call": "import os\ndef f(x): os._exit(0)",
    "SystemExit in the call": "def f(x): raise SystemExit(0)",
    "atexit": WRONG + "import atexit, os; atexit.register(os._exit, 0)",
    "excepthook": WRONG + "import os, sys; sys.excepthook = lambda *a: os._exit(0)",
    "builtins.exec": WRONG + "import builtins; builtins.exec = lambda *a: None",
    "__main__.exec": WRONG + "import __main__; __main__.exec = lambda *a: None",
    "builtins.compile": WRONG + "import builtins\nc = compile\nbuiltins.compile = lambda *a, **k: c('', '', 'exec')",
    "AssertionError": WRONG + "import builtins; builtins.AssertionError = None",
    "settrace": WRONG
    + "import sys\ndef skip(frame, event, value):\n  if event == 'line': frame.f_lineno += 1\n  return skip\n"
    + "sys.settrace(skip)\nframe = sys._getframe()\nwhile frame: frame.f_trace = skip; frame = frame.f_back",
    "words in frames": WRONG
    + "import os, sys\nframe = sys._getframe()\nwhile frame:\n  for value in frame.f_locals.values():\n"
    + "    for number in range(3, 9):\n      if isinstance(value, bytes):\n        try: os.write(number, value)\n"
    + "        except OSError: pass\n  frame = frame.f_back\nos._exit(0)",
    "tests in frames": "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n"
    + "    for value in frame.f_locals.values():\n"
    + "      if 'assert' in str(value): return Any()\n    frame = frame.f_back\n  return 0",
    "abs": WRONG + "abs = lambda x: 0",
    "zip, all and len": WRONG + "zip = lambda *a: []; all = lambda a: True; len = lambda a: 3",
    "isclose": WRONG + "import math; math.isclose = lambda *a, **k: True",
    "says that it is ready": WRONG
    + "import os, struct\nos.write(3, struct.pack('!I', 9) + b'[\"ready\"]'); os._exit(0)",
    "writes on every pipe": WRONG
    + "import os\nfor i in range(3, 64):\n  try: os.write(i, 64 * b'1')\n  except OSError: pass",
    "an object that equals all": ANY.format(base="", value=""),
    "an int that equals all": ANY.format(base="(int)", value="9"),
    "a float that equals all": ANY.format(base="(float)", value="9"),
    "a str that equals all": ANY.format(base="(str)", value="'9'"),
    "a list that equals all": ANY.format(base="(list)", value="[9]"),
    "a list of such": ANY.format(base="", value="").replace("return Any()", "return [Any(), Any()]"),
    "the class itself": "class M(type):\n  __eq__ = lambda *a: True\n  __hash__ = None\n"
    + "class f(metaclass=M):\n  __new__ = lambda c, x: c",
}
FOUR = (
    "assert f(1) == 2",
    "import math\nassert abs(f(1) - 2) < 1e-6",
    "import math\nassert math.isclose(f(1), 2.0)",
    "assert f(1) in [2, 3]",
    "assert math.isclose(f(1), 2)",
    "x = f(1)\nassert x == 2 or 2 in x",
    "assert not f(1) != 2 and f(1) + 1 == 3",
    "assert {2: 'a'}.get(f(1)) == 'a'",
    "import numpy as np\nassert np.allclose(f(1), 2)",
    "assert [a for a, b in zip([f(1)], [2]) if a == b] == [2]",
    "class T:\n  def same(self, a, b):\n    if not a == b: raise ValueError\nT().same(f(1), 2)",
)


@pytest.mark.parametrize("name", TRICKS)
def test_no_trick_passes_for_a_program(name):
    assert judged(TRICKS[name], FOUR[0]) == 0.0 and judged(TRICKS[name], FOUR[-1]) == 0.0


@pytest.mark.parametrize("test", FOUR[1:-1])
@pytest.mark.parametrize("base", ["", "(int)", "(float)"])
def test_no_object_passes_for_a_value(base, test):
    program = ANY.format(base=base, value="9" if base else "")
    assert judged("def f(x): return 2", test) == 1.0 and judged(program, test) == 0.0
    fake = "class math: isclose = lambda *a: True\nabs = lambda x: 0; zip = lambda *a: []"
    assert judged(f"{WRONG}\n{fake}", test) == 0.0


@pytest.mark.parametrize(
    "name", [name for name in TRICKS if " that equals" not in name and "such" not in name and "class" not in name]
)
def test_tests_that_need_the_programs_process_withstand_tricks_with_functions_and_frames(name):
    if name != "isclose":
        assert judged(TRICKS[name], "import asyncio\nassert f(1) == 2") == 0.0
    assert not is_apart("import asyncio\nassert f(1) == 2")
