"""Tools answer calls; what goes wrong in one is told to the model, and what hangs or exits costs its own episode."""

import asyncio
import os
import sys
import threading
import time

import pytest

from nemo_rl_lite.config.keys import parse_override
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.environments.registry import check_environment, make_environments
from nemo_rl_lite.environments.tools import Functions, Python
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.system.user_errors import CallError
from tests.unit.environments.test_environments import config, turn

HERE = "tests.unit.environments.test_tools"
PROBLEM = Problem(chat("?"), "")


def add(a: int, b: int = 1) -> int:
    """
    Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def later(text: str) -> str:
    """
    Repeat a text.

    Args:
        text: The text.
    """
    await asyncio.sleep(0)
    return text * 3


def fail(how: str) -> str:
    """
    Fail.

    Args:
        how: In what way.
    """
    match how:
        case "raise":
            raise KeyError("no such row")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "hang":
            time.sleep(600)
    return threading.current_thread().name


def untyped(a):
    """Add nothing."""
    return a


def calls(*wanted) -> list[dict]:
    """A chat whose last turn makes these calls."""
    return [*PROBLEM.messages, turn("", *wanted)]


def functions(*names: str, **others):
    return config("tools", tools=[f"{HERE}.{name}" for name in names], max_characters=100, **others)


def answers(environment, conversation) -> list[str]:
    return [message["content"] for message in asyncio.run(environment.step(PROBLEM, conversation)).messages]


def test_functions_are_offered_and_their_calls_are_answered_in_order():
    own = functions("add", "later")
    tools = check_environment(own)
    assert [tool["function"]["name"] for tool in tools] == ["add", "later"]
    assert tools[0]["function"]["parameters"]["required"] == ["a"]
    assert tools[0]["function"]["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "The first number.",
    }
    made = Functions(**own.kwargs)
    asked = calls(("later", {"text": "ha"}), ("add", {"a": 2}), ("add", "the arguments: 'a' is missing"))
    observation = asyncio.run(made.step(PROBLEM, asked))
    assert observation.messages == (
        {"role": "tool", "content": "hahaha", "name": "later", "tool_call_id": "call0"},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call1"},
        {"role": "tool", "content": "error: the arguments: 'a' is missing", "name": "add", "tool_call_id": "call2"},
    )
    assert asyncio.run(made.step(PROBLEM, [{"role": "assistant", "content": "6"}])).done
    assert answers(made, calls(("later", {"text": "x" * 40}))) == ["x" * 100 + "\n[20 more characters]"]


def test_a_tool_is_named_by_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'def twice(a: int) -> int:\n    """Double.\n\n    Args:\n        a: A number.\n    """\n    return 2 * a\n'
    (tmp_path / "own.py").write_text(text)
    given = parse_override("environment.kwargs.tools=[own.py:twice]")
    own = config("tools", tools=given.value(), max_characters=100)
    assert [tool["function"]["name"] for tool in check_environment(own)] == ["twice"]
    assert answers(Functions(**own.kwargs), calls(("twice", {"a": 4}))) == ["8"]


def test_what_a_tool_raises_is_told_to_the_model_and_once_to_people(capfd):
    made = Functions([f"{HERE}.fail"], 100)
    for _ in range(2):
        assert answers(made, calls(("fail", {"how": "raise"}))) == ["error: KeyError: 'no such row'"]
    assert answers(made, calls(("fail", {"how": "exit"}))) == ["error: SystemExit: 3"]
    assert capfd.readouterr().err.count("the tool fail raised, and the model reads the error: KeyError") == 1
    assert answers(made, calls(("fail", {"how": "go"})))[0].startswith("tool"), "a plain function has a thread"


def quotes(text: str) -> str:
    """
    Fail, with the argument in the error.

    Args:
        text: What.
    """
    raise ValueError(f"cannot read {text}\n\x1b[2J")


def test_an_error_that_quotes_its_argument_is_printed_once_and_escaped(capfd):
    made = Functions([f"{HERE}.quotes"], 100)
    for number in range(20):
        (answer,) = answers(made, calls(("quotes", {"text": f"{number} \ud800"})))
        assert answer.startswith(f"error: ValueError: cannot read {number}")
    (line,) = capfd.readouterr().err.splitlines()
    place = f"(test_tools.py, line {quotes.__code__.co_firstlineno + 7})"
    assert line.endswith(rf"cannot read 0 \ud800\n\x1b[2J {place}")


def misspelt(text: str) -> str:
    """
    Fail, whatever the argument is.

    Args:
        text: What.
    """
    return txt.upper()  # noqa: F821


def shouted(text: str) -> str:
    """
    Return a text in capitals.

    Args:
        text: What.
    """
    return text.shout()


def test_a_misspelt_name_in_a_tool_is_no_answer():
    with pytest.raises(NameError):
        answers(Functions([f"{HERE}.misspelt"], 100), calls(("misspelt", {"text": "x"})))
    (answer,) = answers(Functions([f"{HERE}.shouted"], 100), calls(("shouted", {"text": "x"})))
    assert answer.startswith("error: AttributeError")


def test_errors_of_more_places_than_anybody_reads_are_not_printed(capfd, monkeypatch):
    monkeypatch.setattr("nemo_rl_lite.system.user_errors._reported", set())
    made = Functions([f"{HERE}.{quotes.__name__}"], 100)
    for number in range(300):
        code = compile("\n" * number + "def tool(text): raise ValueError(text)", f"/generated/{number}.py", "exec")
        exec(code, names := {})
        made._functions["quotes"] = names["tool"]
        answers(made, calls(("quotes", {"text": "x"})))
    assert 0 < len(capfd.readouterr().err.splitlines()) <= 100


def test_a_tool_that_hangs_or_ends_its_process_costs_its_episode():
    # A busy machine takes seconds to start a process.
    hurried, patient = (make_environments(functions("fail", "add", timeout_s=late, processes=2)) for late in (6, 300))

    async def play(environments, *sessions):
        asked = (environments.step(session, PROBLEM, calls(call)) for session, call in sessions)
        return await asyncio.gather(*asked, return_exceptions=True)

    late, fine = asyncio.run(play(hurried, (0, ("fail", {"how": "hang"})), (1, ("add", {"a": 1}))))
    assert isinstance(late, CallError) and "no answer within environment.timeout_s = 6" in str(late)
    assert fine.messages[0]["content"] == "2"
    (died,) = asyncio.run(play(patient, (2, ("fail", {"how": "die"}))))
    assert str(died) == "the environment's process ended with status 7"
    (again,) = asyncio.run(play(patient, (3, ("add", {"a": 5}))))
    assert again.messages[0]["content"] == "6"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "tools names no function"),
        (("add", "add"), "another tool has its name"),
        (("PROBLEM",), "PROBLEM is not a function"),
        (("untyped",), r"untyped: .*type hint.*a tool needs a type for each argument, and a docstring"),
        (("absent",), "has no absent"),
    ],
)
def test_functions_that_are_no_tools_are_errors_before_the_run(names, message):
    with pytest.raises(ConfigError, match=message):
        check_environment(functions(*names))


LIMITS = {"seconds": 5, "memory_mib": 512, "max_characters": 200}


def run(code: str, **limits) -> str:
    (answer,) = answers(Python("tool", **{**LIMITS, **limits}), calls(("python", {"code": code})))
    return answer


def test_python_prints_or_says_what_went_wrong():
    assert run("print(6 * 7)") == "42"
    assert run("x = 1") == "[nothing was printed]"
    wrong = run("print('so far')\n1 / 0")
    assert wrong.startswith("so far\nTraceback") and wrong.endswith("ZeroDivisionError: division by zero")
    assert "line 2" in wrong and "sandbox" not in wrong, "the traceback is the code's own"
    assert "SyntaxError" in run("print(") and "sandbox" not in run("print(")


def test_python_stops_what_hangs_prints_without_end_takes_memory_or_exits():
    assert run("while True: pass", seconds=1).endswith("error: the code took longer than 1 s")
    # What the kernel sends where the processor time is over before the time.
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)") == "error: the code took longer than 5 s"
    endless = run("while True: print('a' * 1000)")
    assert endless.startswith("a" * 200 + "\n[") and len(endless) < 400
    assert "MemoryError" in run("x = 'a' * 2**40")
    assert run("import os; print(1, flush=True); os._exit(3)") == "1"
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)") == "error: signal 11 ended the code"


def test_python_says_which_limit_its_processes_exceeded_together():
    forks = "import os, time\nfor _ in range({n}): os.fork() or {then} or time.sleep(60)\ntime.sleep(60)"
    assert run(forks.format(n=200, then=0)) == "error: the code had more than 128 processes and threads"
    large = forks.format(n=9, then="(x := bytearray(10**8)) and 0")
    assert run(large).endswith("MiB of memory in all its processes")


def test_python_that_kills_its_parent_gets_an_answer():
    answer = run("import os\nos.kill(os.getppid(), 9)\nprint('on')")
    assert answer == "on" or answer.startswith("error: ")


def test_python_in_blocks_is_for_models_without_tools():
    made = Python("block", **LIMITS)
    assert not made.tools and Python("tool", **LIMITS).tools
    turn = {"role": "assistant", "content": "First\n```python\nprint(1)\n```\nand then\n```py\nprint(2)\n```"}
    assert asyncio.run(made.step(PROBLEM, [turn])).messages == ({"role": "user", "content": "2"},)
    assert asyncio.run(made.step(PROBLEM, [{"role": "assistant", "content": "```\nprint(1)\n```"}])).done
    # A model with tools may show a block without a call.
    assert asyncio.run(Python("tool", **LIMITS).step(PROBLEM, [turn])).done
