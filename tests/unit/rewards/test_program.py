"""Programs are judged by what they do, within limits, and cannot exit their way past the tests."""

import json
import socket
import subprocess
import time

import psutil
import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.rewards.program import passes_tests
from nemo_rl_lite.system.sandbox import Limits, run_python

DOUBLE = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
FAST = Limits(seconds=2.0, memory_mib=256, output=1000)


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
        ("print 'hello'", "is no Python"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, "calls the function f"),
    ],
)
def test_tests_that_would_pass_any_program_are_refused(tests, words):
    with pytest.raises(ValueError, match=words):
        judged(DOUBLE, tests)


def test_limits_hold():
    started = time.monotonic()
    late = run_python("import time; time.sleep(60)", limits=FAST)
    assert late.status is None and not late.is_complete and time.monotonic() - started < 20
    large = run_python("x = bytearray(10**9)", limits=FAST)
    assert large.status != 0 and "MemoryError" in large.output
    loud = run_python("print('x' * 10**6)", limits=FAST)
    assert len(loud.output) == 1000
    assert run_python("print(input())", stdin="hello", limits=FAST).output == "hello\n"


def test_children_end_with_the_code():
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    ran = run_python(script, limits=FAST)
    assert ran.is_complete
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and is_alive(int(ran.output)):
        time.sleep(0.05)
    assert not is_alive(int(ran.output))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_code_reaches_no_server_where_the_kernel_allows_that():
    allowed = subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip("this kernel gives processes no network of their own")
    server = socket.create_server(("127.0.0.1", 0))
    script = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
    assert run_python(script, limits=FAST).status == 1
    server.close()
