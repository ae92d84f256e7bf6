"""Find a reward: a function `(response, answer, **kwargs) -> float`, by a name from here, a dotted path, or by file.

A function that cannot judge a sample raises an error, or returns None or NaN. A function with a parameter called
`problem` also receives the `Problem`, with its messages and metadata. A function that judges many responses at a time
gets lists (`responses`, `answers`, and `problems` where it has that parameter), and returns a list. A class is made
once in each process, with the kwargs, and the object is called like a function.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from numbers import Real
from typing import Any

from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.system.pool import as_call_error

# Rewards become float32, like all that is trained on.
_LARGEST = 3.4028234663852886e38


class RewardError(Exception):
    """The reward of one sample could not be computed; the message says why. `section` holds the reward's keys, and
    `details` the traceback of a user's code."""

    section = "reward"

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


class LateReward(RewardError):
    """The response takes too long to judge, and that is its own fault: its reward is 0."""


class WrongReward(RewardError):
    """A function returns what is no reward: it is written for something else."""


class UnavailableReward(RewardError):
    """What the reward needs is not there: a server does not answer, or a class cannot be made. A run does not start so;
    one that is under way may go on (`reward.max_error_share`)."""


def checked_reward(source: str, value: Any) -> float:
    """What `source`, a function or an environment, returned as the reward of a sample.

    Raises:
        RewardError: None, NaN or an infinity, which say that this sample cannot be judged.
        WrongReward: not a number, or one that is too large for float32.
    """
    if value is None:
        raise RewardError(f"{source} returned None")
    # Scalars of numpy and torch are numbers; their arrays are not.
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        value = value.item()
    if not isinstance(value, Real):
        shown = f"{value!r:.80}" + "..." * (len(repr(value)) > 80)
        raise WrongReward(f"{source} returned {shown}, a {type(value).__name__}; a reward is one number")
    try:
        reward = float(value)
    except OverflowError:
        # A whole number that even float64 does not hold.
        reward = 2 * _LARGEST
    if not math.isfinite(reward):
        raise RewardError(f"{source} returned {reward}")
    if abs(reward) > _LARGEST:
        raise WrongReward(f"{source} returned a number that is too large for float32: {value!s:.40}")
    return reward


Reward = Callable[[str, Problem], float | Awaitable[float]]
"""Returns the reward of a response to a problem, or a coroutine that does. A user's function may raise anything."""

BatchReward = Callable[[Sequence[str], Sequence[Problem]], Awaitable[list[float | RewardError]]]
"""Returns for each response its reward, or why there is none. A user's function may raise anything."""

# The name of the reward that is always 0.
NONE = "none"
# Values are paths, because some modules import slow or optional packages.
REWARDS = {
    "exact_match": "nemo_rl_lite.rewards.builtin.exact_match",
    "last_number": "nemo_rl_lite.rewards.builtin.last_number",
    "format": "nemo_rl_lite.rewards.builtin.format_match",
    "math": "nemo_rl_lite.rewards.mathematics.same_value",
    "reasoning_gym": "nemo_rl_lite.rewards.builtin.task_score",
    "program": "nemo_rl_lite.rewards.program.passes_tests",
    "judge": "nemo_rl_lite.rewards.llm_judge.LLMJudge",
    NONE: "nemo_rl_lite.rewards.builtin.nothing",
}

# These need no process of their own to be ended in time.
INSTANT = frozenset({"exact_match", "last_number", NONE})

# What takes these long is the response, so that one that cannot be judged in time is wrong.
WRONG_WHERE_LATE = frozenset({"format", "math", "program"})


def find_reward(name: str, kwargs: Mapping[str, Any], section: str = "reward") -> Reward:
    """Return the reward named `name`: one of `REWARDS`, or a user's (see `imported`). `section` holds its keys.

    Raises:
        ConfigError: no such function, or it does not take the kwargs.
    """
    function = _found(name, kwargs, section, ("response", "answer"), "problem")

    def reward(response: str, problem: Problem) -> float | Awaitable[float]:
        value = function(response, problem.answer, problem)
        return _awaited(name, value) if inspect.isawaitable(value) else checked_reward(name, value)

    return reward


def find_batch_reward(name: str, kwargs: Mapping[str, Any], section: str = "reward") -> BatchReward:
    """Return the reward named `name`, which judges many responses at a time. Raises what `find_reward` does."""
    function = _found(name, kwargs, section, ("responses", "answers"), "problems")

    async def rewards(responses: Sequence[str], problems: Sequence[Problem]) -> list[float | RewardError]:
        value = function(list(responses), [problem.answer for problem in problems], list(problems))
        return _checked_rewards(name, await value if inspect.isawaitable(value) else value, len(responses))

    return rewards


async def _awaited(name: str, value: Awaitable[Any]) -> float:
    return checked_reward(name, await value)


def _checked_rewards(name: str, values: Any, count: int) -> list[float | RewardError]:
    """Raises WrongReward: `values` are not a list of `count` rewards."""
    # Arrays of numpy and torch have this.
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        raise WrongReward(f"{name} returned a {type(values).__name__} for a list of responses; it returns a list")
    if len(values) != count:
        raise WrongReward(f"{name} returned {len(values)} rewards for {count} responses")
    found = list[float | RewardError]()
    for value in values:
        try:
            found.append(checked_reward(name, value))
        except WrongReward:
            raise
        except RewardError as error:
            found.append(error)
    return found


def _found(
    name: str, kwargs: Mapping[str, Any], section: str, arguments: tuple[str, str], of_problem: str
) -> Callable[[Any, Any, Any], Any]:
    """What calls the user's function, or a class' object, with `arguments` and what is of the problem."""
    target = _import(REWARDS.get(name, name), section)
    is_class = inspect.isclass(target)
    function = target
    if is_class:
        # The method of its objects.
        function = next((vars(one)["__call__"] for one in target.__mro__ if "__call__" in vars(one)), None)
    if function is None:
        raise ConfigError([Violation(f"{section}.name", name, "is not a function", "name a function")])
    takes_problem = of_problem in inspect.signature(function).parameters
    own = {of_problem: None} if takes_problem else {}
    if is_class:
        made, given = cache(lambda: _made(name, target, kwargs)), {}
        fits = [(target, (), kwargs), (function, ("self", *arguments), own)]
        called = f"{target.__name__}(**{section}.kwargs), and the object as object({', '.join(arguments)})"
    else:
        made, given = lambda: target, kwargs
        fits = [(target, arguments, {**own, **kwargs})]
        called = f"function({', '.join(arguments)}, **{section}.kwargs)"
    try:
        for one, positional, keywords in fits:
            inspect.signature(one).bind(*positional, **keywords)
    except TypeError as error:
        rule, fix = f"do not fit {name}: {error}", f"a reward is called as {called}"
        raise ConfigError([Violation(f"{section}.kwargs", dict(kwargs), rule, fix)]) from None

    def call(first: Any, second: Any, problem: Any) -> Any:
        own = {of_problem: problem} if takes_problem else {}
        return made()(first, second, **own, **given)

    return call


def _made(name: str, target: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Only the processes that judge make the object: it may hold a model. Raises UnavailableReward: it cannot be."""
    try:
        return target(**kwargs)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise UnavailableReward(f"{name} cannot be made: {as_call_error(error)}") from error


def _import(path: str, section: str) -> Callable[..., Any]:
    try:
        target = imported(path)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        rule = f"cannot be imported: {as_call_error(error)}"
        fix = f"choose one of {', '.join(REWARDS)}, or give package.module.function or path/to/file.py:function"
        raise ConfigError([Violation(f"{section}.name", path, rule, fix)]) from error
    if not callable(target):
        raise ConfigError([Violation(f"{section}.name", path, "is not a function", "name a function")])
    return target
