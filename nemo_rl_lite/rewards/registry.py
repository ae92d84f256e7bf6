"""Find a reward function `(response, answer, **kwargs) -> float` by a built-in name, a dotted path or a file.

A function that cannot score a sample raises an error, or returns None or NaN. If it has a parameter `problem`, it also
gets the `Problem`, with messages and metadata. A batched function gets lists (`responses`, `answers`, and `problems` if
it has that parameter) and returns a list. A class is instantiated once per process, with the kwargs, and the object is
called like a function.
"""

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from numbers import Real
from typing import Any

from nemo_rl_lite.config.user_code import imported_for
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.system.user_errors import as_call_error

# The largest float32, which rewards become.
_LARGEST = 3.4028234663852886e38
# Characters that some trackers do not take in the name of a metric.
_ODD = re.compile(r"[^\w ./-]")


class RewardError(Exception):
    """A reward could not be computed. `section` holds its keys, `details` the traceback of user code."""

    section = "reward"

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


class LateReward(RewardError):
    """Scoring exceeded the time limit because of the response: its reward is 0."""


class WrongReward(RewardError):
    """The function does not return a reward."""


class FaultyReward(WrongReward):
    """The function's code is wrong for every response."""


class UnavailableReward(RewardError):
    """A server does not answer, or a class cannot be instantiated. A run does not start; a running one may continue
    (`reward.max_failure_fraction`)."""


def checked_reward(source: str, value: Any, what: str = "a reward") -> float:
    """Convert `what`, a reward or a metric, that `source`, a function or an environment, returned.

    Raises:
        RewardError: it is None, NaN or infinite.
        WrongReward: it is not a number, or is too large for float32.
    """
    if value is None:
        raise RewardError(f"{source} returned None")
    # Scalars of numpy and torch are numbers, unlike their arrays.
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        value = value.item()
    if not isinstance(value, Real):
        shown = f"{value!r:.80}" + "..." * (len(repr(value)) > 80)
        raise WrongReward(f"{source} returned {shown}, a {type(value).__name__}; {what} is one number")
    try:
        reward = float(value)
    except OverflowError:  # an int beyond float64
        reward = 2 * _LARGEST
    if not math.isfinite(reward):
        raise RewardError(f"{source} returned {reward}")
    if abs(reward) > _LARGEST:
        raise WrongReward(f"{source} returned a number that is too large for float32: {value!s:.40}")
    return reward


def checked_metrics(source: str, metrics: Any) -> dict[str, float]:
    """Convert the metrics of an episode that `source`, an environment or an agent, returned. Characters of a name that
    some trackers do not take become `_`.

    Raises:
        RewardError: a value is None, NaN or infinite.
        WrongReward: a value is not a number, a name is not text, or `metrics` is not a mapping.
    """
    if not isinstance(metrics, Mapping):
        raise WrongReward(f"{source} returned {metrics!r:.80} as metrics, which are numbers by name")
    found = dict[str, float]()
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise WrongReward(f"{source} returned a metric with the name {name!r:.80}; a name is text")
        try:
            found[_tracked(name)] = checked_reward(source, value, "a metric")
        except RewardError as error:
            fix = "" if isinstance(error, WrongReward) else "; leave it out of episodes without a value"
            raise type(error)(f"metric {name!r}: {error}{fix}") from None
    return found


def _tracked(name: str) -> str:
    """Return a name that all trackers take: without odd characters, and without empty and relative parts of a path."""
    return "/".join(part for part in _ODD.sub("_", name).split("/") if part.strip(".")) or "_"


Reward = Callable[[str, Problem], float | Awaitable[float]]
"""Returns the reward of a response, or a coroutine of it. A user's function may raise anything."""

BatchReward = Callable[[Sequence[str], Sequence[Problem]], Awaitable[list[float | RewardError]]]
"""Returns a reward or an error for each response. A user's function may raise anything."""

# Name of the reward that is always 0.
NONE = "none"
# Paths, because some modules import slow or optional packages.
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

# Pages on the rewards of other libraries, by one of their parameters.
_GUIDES = {"completions": "docs/from_trl.md", "solution_str": "docs/from_verl.md"}

# Rewards that are 0 or 1. `program` is one without its `share`.
BINARY = frozenset({"exact_match", "last_number", "math"})

# Rewards fast enough for the launcher's process.
INSTANT = frozenset({"exact_match", "last_number", NONE})

# Rewards whose time depends on the response: a timeout means a wrong response.
WRONG_IF_LATE = frozenset({"format", "math", "program", "reasoning_gym"})


def find_reward(name: str, kwargs: Mapping[str, Any], section: str = "reward") -> Reward:
    """Find the reward `name`: one of `REWARDS`, or a user's (see `imported`). `section` holds its keys. Raises
    ConfigError: there is no such function, or it does not take the kwargs."""
    function = _found(name, kwargs, section, ("response", "answer"), "problem")

    def reward(response: str, problem: Problem) -> float | Awaitable[float]:
        value = function(response, problem.answer, problem)
        return _awaited(name, value) if inspect.isawaitable(value) else checked_reward(name, value)

    return reward


def find_batch_reward(name: str, kwargs: Mapping[str, Any], section: str = "reward") -> BatchReward:
    """Find the batched reward `name`. Raises what `find_reward` raises."""
    function = _found(name, kwargs, section, ("responses", "answers"), "problems")

    async def rewards(responses: Sequence[str], problems: Sequence[Problem]) -> list[float | RewardError]:
        value = function(list(responses), [problem.answer for problem in problems], list(problems))
        return _checked_rewards(name, await value if inspect.isawaitable(value) else value, len(responses))

    return rewards


async def _awaited(name: str, value: Awaitable[Any]) -> float:
    return checked_reward(name, await value)


def _checked_rewards(name: str, values: Any, count: int) -> list[float | RewardError]:
    """Convert a batch of rewards. Raises WrongReward: `values` is not a list of `count` rewards."""
    # Arrays of numpy and torch.
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        raise WrongReward(f"{name} returned a {type(values).__name__} for a list of responses; return a list")
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
    """Return a function that calls the user's function, or an object of the user's class, with its arguments."""
    fix = f"choose one of {', '.join(REWARDS)}, or give package.module.function or path/to/file.py:function"
    target = function = imported_for(f"{section}.name", REWARDS.get(name, name), fix)
    is_class = inspect.isclass(target)
    if is_class:
        # The method of its objects.
        function = next((vars(one)["__call__"] for one in target.__mro__ if "__call__" in vars(one)), None)
    if not callable(function):
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
        pages = [page for one, page in _GUIDES.items() if one in inspect.signature(function).parameters]
        rule, fix = f"do not fit {name}: {error}", "; see ".join([f"a reward is called as {called}", *pages])
        raise ConfigError([Violation(f"{section}.kwargs", dict(kwargs), rule, fix)]) from None

    def call(first: Any, second: Any, problem: Any) -> Any:
        own = {of_problem: problem} if takes_problem else {}
        return made()(first, second, **own, **given)

    return call


def _made(name: str, target: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Instantiate the class, only in the scoring processes: it may load a model. Raises UnavailableReward."""
    try:
        return target(**kwargs)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise UnavailableReward(f"{name} cannot be instantiated: {as_call_error(error)}") from error
