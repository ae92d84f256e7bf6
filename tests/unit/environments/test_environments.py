import time

import pytest

from nemo_rl_lite.config.schema import EnvironmentConfig
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.registry import check_environment, find_environment, make_environments
from nemo_rl_lite.environments.tools import Calculator, calculate
from nemo_rl_lite.errors import ConfigError

PROBLEM = Problem(chat("?"), "")


class Own:
    """This is a user's environment."""

    def __init__(self, level: int):
        self.level = level

    def step(self, problem, conversation):
        return Observation(done=True)


HERE = "tests.unit.environments.test_environments"


def config(name, timeout_s=None, concurrency=8, processes=2, **kwargs):
    return EnvironmentConfig(
        name=name,
        max_turns=3,
        timeout_s=timeout_s,
        concurrency=concurrency,
        processes=processes,
        max_failure_fraction=0.5,
        kwargs=kwargs,
    )


def turn(text: str, *calls: tuple[str, dict | str]) -> dict:
    """An assistant's turn with calls of tools: a name, and arguments or an error."""
    called = []
    for number, (name, given) in enumerate(calls):
        is_right = isinstance(given, dict)
        function = {"name": name, "arguments": given if is_right else {}}
        called.append({"id": f"call{number}", "function": function} | ({} if is_right else {"error": given}))
    return {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 * (4 + 5)", "27"),
        ("-7 // 2", "-4"),
        ("10 / 4", "2.5"),
        ("9 / 3", "3"),
        (" 0.1 + 0.2 ", "0.3"),
        ("7 % 4", "3"),
    ],
)
def test_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["9**9**9**9", "1/0", "__import__('os')", "'a' * 9", "1 +", "True + 1", "(" * 150, "9" * 190 + "*9", "1e400", "x"],
)
def test_anything_else_is_answered_with_words_and_at_once(expression):
    started = time.process_time()
    assert calculate(expression).startswith("error: ")
    assert time.process_time() - started < 10


@pytest.mark.parametrize("unit", ["<calc>", "</calc>", "<calc>1", "<calc>1</calc>", "<", " ", "("])
def test_a_calculator_finds_its_calls_in_linear_time(unit):
    began = time.process_time()
    Calculator("user").step(PROBLEM, [{"role": "assistant", "content": "<calc>" + unit * (2**18 // len(unit))}])
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("text", "answer"), [("<calc>1<calc>2+3</calc>", "error"), ("<calc>1</calc></calc><calc>2</calc><calc>", "2")]
)
def test_the_last_complete_call_of_a_turn_is_answered(text, answer):
    (message,) = Calculator("user").step(PROBLEM, [{"role": "assistant", "content": text}]).messages
    assert message["content"].startswith(answer)


def test_environments_by_name_by_dotted_path_and_by_file():
    check_environment(config(None))
    assert make_environments(config(None)) is None
    assert find_environment("calculator") is Calculator
    check_environment(config("tests.unit.environments.test_environments.Own", level=2))
    check_environment(config(f"{__file__}:Own", level=2))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("tests.unit.environments.test_environments.Absent", {}, r"environment\.name.*\n.*cannot be imported"),
        ("tests.unit.environments.test_environments.Own", {}, r"environment\.name.*\n.*missing 1 required.*\n.*give"),
        ("tests.unit.environments.test_environments.Own", {"lvel": 1}, r"environment\.kwargs.*\n.*'lvel'.*\n.*correct"),
        ("builtins.dict", {}, r"environment\.name.*\n.*no method step"),
    ],
)
def test_environments_that_cannot_be_made(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        check_environment(config(name, **kwargs))
