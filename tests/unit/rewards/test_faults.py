"""A misspelt name in a reward ends the run; an error that a response causes costs one sample."""

import asyncio
import importlib
import json
import math
import re
from contextlib import suppress

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rewards.judge import RewardError, make_judge, try_reward
from nemo_rl_lite.rewards.registry import FaultyReward
from tests.unit.rewards.test_judge import config

HERE = "tests.unit.rewards.test_faults"


def helper(one, two):
    return unknown_too(one, two)  # noqa: F821


def name(response, answer):
    return math.sqrt(unknown)  # noqa: F821


def name_in_a_branch(response, answer):
    return unknown if response else 0.0  # noqa: F821


def name_in_a_helper(response, answer):
    return helper(response, answer)


def module_attribute(response, answer):
    return re.serch("a", response)


def parameter_attribute(response, answer):
    return response.content == answer


def missing_module(response, answer):
    import no_such_package

    return no_such_package.score(response)


def missing_name(response, answer):
    from math import no_such_name

    return no_such_name(response)


def arity(response, answer):
    return helper(response)


def builtin_arity(response, answer):
    return len(response, answer)


async def later(response, answer):
    return unknown  # noqa: F821


class UnknownAttribute:
    def __call__(self, response, answer):
        return self.unknown


FAULTS = (
    name, name_in_a_branch, name_in_a_helper, module_attribute, parameter_attribute, missing_module, missing_name,
    arity, builtin_arity, later, UnknownAttribute,
)  # fmt: skip


def no_match(response, answer):
    return float(re.search(r"<answer>(.*)</answer>", response).group(1) == answer)


def unset_local(response, answer):
    if "x" in response:
        found = 1.0
    return found


def other_type(response, answer):
    return json.loads(response).get("score")


def parsed_or_not(response, answer):
    with suppress(TypeError):
        response = json.loads(response)["score"]
    return response.value


def code_of_the_response(response, answer):
    return eval("unknown + 1")


def function_of_the_response(response, answer):
    defined = {}
    exec("def solve(one): return one", defined)
    return defined["solve"](1, 2)


def attribute_by_the_response(response, answer):
    return getattr(math, f"no_{response}")


def module_by_the_response(response, answer):
    return importlib.import_module(f"no_{response}")


def arguments_of_the_response(response, answer):
    return helper(*response)


class UnsetAttribute:
    def __call__(self, response, answer):
        if "x" in response:
            self.found = 1.0
        return self.found


BY_RESPONSE = (
    no_match, unset_local, other_type, parsed_or_not, code_of_the_response, function_of_the_response,
    attribute_by_the_response, module_by_the_response, arguments_of_the_response,
    UnsetAttribute,
)  # fmt: skip


def verdict(reward, timeout_s=None):
    judge = make_judge(config(f"{HERE}.{reward.__name__}", timeout_s, 1))

    async def one():
        return await judge("1", Problem(chat("?"), "1"))

    return asyncio.run(one())


@pytest.mark.parametrize("reward", FAULTS)
def test_an_error_of_the_code_is_a_fault_with_file_and_line(reward):
    found = verdict(reward)
    assert isinstance(found, FaultyReward) and re.search(r"\(test_faults\.py, line \d+\)$", str(found))


@pytest.mark.parametrize("reward", BY_RESPONSE)
def test_an_error_of_a_response_is_none(reward):
    found = verdict(reward)
    assert isinstance(found, RewardError) and not isinstance(found, FaultyReward)


def test_a_fault_in_another_process_ends_the_trial_call():
    assert isinstance(verdict(name, timeout_s=60), FaultyReward)
    place = rf"test_faults\.py, line {name.__code__.co_firstlineno + 1}\)"
    with pytest.raises(ConfigError, match=rf"(?s)reward\.name.*NameError.*unknown.*{place}"):
        try_reward(make_judge(config(f"{HERE}.name", None, 1)), Problem(chat("?"), "1"))
