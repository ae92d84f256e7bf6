import math
import time

import numpy as np
import pytest
import torch

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rewards.registry import (
    INSTANT,
    RewardError,
    WrongReward,
    checked_metrics,
    checked_reward,
    find_reward,
)


def shout(response: str, answer: str, volume: float = 1.0) -> float:
    """This is a user's reward."""
    return volume * (response == answer.upper())


def as_long_as_the_prompt(response: str, answer: str, problem: Problem) -> float:
    """This reward uses the problem, not only the answer."""
    return float(len(response) == len(problem.messages[0]["content"]) + problem.metadata["extra"])


def of_trl(completions, **kwargs):
    """This reward is written for TRL."""


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    """This reward is written for verl."""


def problem(answer: str, **metadata) -> Problem:
    return Problem(chat("why?"), answer, metadata)


def test_arguments_that_the_reward_does_not_take_are_refused():
    with pytest.raises(ConfigError, match="unexpected keyword argument 'loudness'"):
        find_reward("tests.unit.rewards.test_registry.shout", {"loudness": 3})


@pytest.mark.parametrize("library", ["trl", "verl"])
def test_a_reward_of_another_library_is_told_which_page_helps(library):
    with pytest.raises(ConfigError, match=rf"is called as function\(response, answer.*; see docs/from_{library}.md"):
        find_reward(f"tests.unit.rewards.test_registry.of_{library}", {})


def test_exact_match():
    reward = find_reward("exact_match", {})
    assert reward(" 42\n", problem("42")) == 1.0
    assert reward("42.", problem("42")) == 0.0


SEPARATORS = (
    " ",
    "1",
    "1,",
    ".1",
    "-",
    "1e",
    "{",
    "$",
    "%",
    "\N{MINUS SIGN}",
    "\u0301\u0316",
    "\u0f71\u0f72",
    "e\u0301",
    "\u0344",
)


@pytest.mark.parametrize("name", sorted(INSTANT))
def test_rewards_in_the_launchers_own_process_take_linear_time(name):
    reward = find_reward(name, {})
    assert find_reward("exact_match", {})("cafe\u0301", problem("caf\u00e9")) == 1.0
    for unit in SEPARATORS:
        began = time.process_time()
        reward("a" + unit * (2**16 // len(unit)), problem("1"))
        # Quadratic time would take far longer, and a busy machine does not.
        assert time.process_time() - began < 10, unit


def test_a_users_own_reward_by_dotted_path():
    reward = find_reward("tests.unit.rewards.test_registry.shout", {"volume": 3})
    assert reward("HI", problem("hi")) == 3.0
    assert isinstance(reward("x", problem("y")), float)


@pytest.mark.parametrize(
    "name",
    [
        "tests.unit.exits.anything",
        "tests.unit.rewards.test_registry.absent",
        "no_such_module.function",
        "tests.unit.rewards.test_registry.__name__",
    ],
)
def test_rewards_that_cannot_be_imported(name):
    with pytest.raises(ConfigError, match=r"reward\.name"):
        find_reward(name, {})


def test_a_reward_that_asks_for_the_problem_gets_it():
    reward = find_reward("tests.unit.rewards.test_registry.as_long_as_the_prompt", {})
    assert reward("12345", problem("", extra=1)) == 1.0
    assert reward("12345", problem("", extra=2)) == 0.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [("<think>a\nb</think> 4", 1.0), (" <think></think>\n", 1.0), ("<think>a", 0.0), ("x <think></think>", 0.0)],
)
def test_format(response, expected):
    reward = find_reward("format", {"pattern": "<think>.*</think>.*"})
    assert reward(response, problem("")) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("So it is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("The answer is 1,234.", "1234", 1.0),
        ("$x = \\frac12$", "\\frac{1}{2}", 1.0),
        ("3 + 4 = 7", "7", 1.0),
        ("$\\frac{1}{3}$", "\\frac{2}{3}", 0.0),
        # The last expression counts, and not the set of neighbours.
        ("\\boxed{5}, hmm wait. \\boxed{6}", "6", 1.0),
        ("\\boxed{5}, hmm wait. \\boxed{6}", "5", 0.0),
        ("$3$ or $4$", "4", 1.0),
        ("$3$ or $4$", "3", 0.0),
        # Without any mark.
        ("The answer is 50%", "50%", 1.0),
        ("A", "A", 1.0),
        ("The answer is B.", "B", 1.0),
        ("(1,2)", "(1,2)", 1.0),
        ("\N{MINUS SIGN}5", "-5", 1.0),
        ("It is **1/2**", "0.5", 1.0),
        # One expression counts, however many are named.
        ("$6$ and 5", "5", 1.0),
        ("\\(6\\) or 5", "6", 0.0),
        ("12 or x", "x", 1.0),
        ("12 eggs or 13 ducks", "13", 1.0),
        # Dollars of money.
        ("It costs $5 or $6", "5", 0.0),
        ("At $5 each, $x=3$", "3", 1.0),
        ("She makes $9 * 2 = $18 every day", "18", 1.0),
        ("It costs \\$18, not \\$20.", "20", 1.0),
    ],
)
def test_math(response, answer, expected):
    assert find_reward("math", {})(response, problem(answer)) == expected


@pytest.mark.parametrize(("name", "answer"), [("math", " "), ("last_number", ""), ("last_number", "twelve")])
def test_a_reference_that_equals_no_response_is_an_error_and_no_zero(name, answer):
    with pytest.raises(ValueError, match=r"the reference answer .*is (empty|not a number)"):
        find_reward(name, {})("42", problem(answer))


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("The final answer is 12.", "12", 1.0),
        ("7 + 5 = 12", "12", 1.0),
        ("12 = 7 + 5", "12", 0.0),
        ("3 - 5 = -2", "-2", 1.0),
        ("3-5", "-5", 0.0),
        ("about $1,250.00 in all", "1250", 1.0),
        ("1,2,3", "3", 1.0),
        ("twelve", "12", 0.0),
        ("", "12", 0.0),
        ("it is \N{MINUS SIGN}5", "-5", 1.0),
        ("it is -5", "\N{MINUS SIGN}5", 1.0),
        ("it is 5", "\N{MINUS SIGN}5", 0.0),
        ("it is .5", "0.5", 1.0),
        ("it is -.5", "-0.5", 1.0),
        ("Rs.500", "500", 1.0),
        ("1e5", "100000", 1.0),
        ("1e5", "5", 0.0),
        ("about 1.5e3", "1500", 1.0),
        ("3/4", "0.75", 1.0),
        ("3/4", "4", 0.0),
        ("so \\frac{3}{4} of it", "0.75", 1.0),
        ("1 1/2 cups", "1.5", 1.0),
        ("10^5", "100000", 1.0),
        ("10^5", "5", 0.0),
        ("1.2 \\times 10^{5}", "1.2e5", 1.0),
        ("10\N{SUPERSCRIPT TWO}", "100", 1.0),
        ("1 234", "1234", 1.0),
        ("1 234", "234", 0.0),
        ("\N{EN DASH}5", "-5", 1.0),
        ("\N{EN DASH}5", "5", 0.0),
        ("3\N{EN DASH}5", "5", 1.0),
        ("-$5.50", "-5.5", 1.0),
        ("\N{VULGAR FRACTION ONE HALF}", "0.5", 1.0),
        ("it is 50%", "0.5", 1.0),
        ("it is 50%", "50%", 1.0),
        ("it is 0.5", "50%", 1.0),
        ("30 cm^2", "30", 1.0),
        ("0.0000001", "0.0000002", 0.0),
        ("1,234,567", "1234567", 1.0),
        ("1/0", "0", 0.0),
    ],
)
def test_last_number(response, answer, expected):
    assert find_reward("last_number", {})(response, problem(answer)) == expected


@pytest.mark.parametrize("name", ["exact_match", "last_number", "math"])
@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>it is 41</think>\n42", 1.0),
        ("it is 41</think>42", 1.0),
        ("<think>42</think>41", 0.0),
        ("<think>42</think>", 0.0),
        ("<think>it is 42", 0.0),
        ("<think>a</think><think>42", 0.0),
    ],
)
def test_rewards_judge_what_follows_the_last_thought(name, response, expected):
    assert find_reward(name, {})(response, problem("42")) == expected


def test_an_unfinished_thought_is_no_empty_answer():
    assert find_reward("exact_match", {})("<think>hm", problem("")) == 0.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), (-0.5, -0.5), (np.float32(0.25), 0.25), (torch.tensor(2.0), 2.0), (3.4e38, 3.4e38)],
)
def test_numbers_are_rewards(value, expected):
    reward = checked_reward("mine", value)
    assert type(reward) is float and reward == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1.0", "returned '1.0', a str"),
        ([1.0, 0.0], r"returned \[1.0, 0.0\], a list"),
        ({"score": 1}, "a dict; a reward is one number"),
        (np.ones(3), "a ndarray"),
        (torch.ones(3), "a Tensor"),
        (1e39, "too large for float32: 1e"),
        (-(10**400), "too large for float32: -1000"),
    ],
)
def test_what_is_no_reward_is_named(value, said):
    with pytest.raises(WrongReward, match=f"^mine .*{said}"):
        checked_reward("mine", value)


def test_metrics_are_numbers_by_name():
    found = checked_metrics("mine", {"calls/bash": np.int64(3), "pass@1": True, "mean (s)": 0.5})
    assert found == {"calls/bash": 3.0, "pass_1": 1.0, "mean _s_": 0.5} and {*map(type, found.values())} == {float}
    assert checked_metrics("mine", {"/app//x/": 1, "../y.z": 2, "//": 3}) == {"app/x": 1, "y.z": 2, "_": 3}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"calls": "three"}, "metric 'calls': mine returned 'three', a str; a metric is one number$"),
        ({"calls": {"bash": 3}}, "metric 'calls': .* a dict; a metric is one number$"),
        ({"calls": math.nan}, "metric 'calls': mine returned nan; leave it out of episodes without a value"),
        ({"calls": None}, "metric 'calls': mine returned None; leave it out"),
        ({7: 1.0}, "mine returned a metric with the name 7; a name is text"),
        ([3.0], r"mine returned \[3.0\] as metrics, which are numbers by name"),
    ],
)
def test_what_is_no_metric_is_named(metrics, said):
    with pytest.raises(RewardError, match=said):
        checked_metrics("mine", metrics)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_sample_that_cannot_be_judged_is_an_error_of_that_sample(value):
    with pytest.raises(RewardError, match=f"^mine returned {value}$") as error:
        checked_reward("mine", value)
    assert not isinstance(error.value, WrongReward)
