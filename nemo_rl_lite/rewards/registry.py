"""Find a reward: a function `(response, answer, **kwargs) -> float`, by a name from here or by a dotted path.

A function that cannot judge a sample raises an error, or returns None or NaN. A function with a parameter called
`problem` also receives the `Problem`, with its messages and metadata.
"""

import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import ConfigError, Violation

Reward = Callable[[str, Problem], float | Awaitable[float]]
"""Returns the reward of a response to a problem, or a coroutine that does. A user's function may raise anything."""


class RewardError(Exception):
    """The reward of one sample could not be computed; the message says why."""


class WrongReward(RewardError):
    """A function returns what is no reward: it is written for something else."""


# Rewards become float32, like all that is trained on.
_LARGEST = 3.4028234663852886e38

_LONGEST_ERROR = 300

# Values are paths, because some modules import slow or optional packages.
REWARDS = {
    "exact_match": "nemo_rl_lite.rewards.text.exact_match",
    "last_number": "nemo_rl_lite.rewards.text.last_number",
    "format": "nemo_rl_lite.rewards.text.format_match",
    "math": "nemo_rl_lite.rewards.mathematics.same_value",
    "reasoning_gym": "nemo_rl_lite.rewards.gym.task_score",
    "program": "nemo_rl_lite.rewards.program.passes_tests",
}

# These need no process of their own to be ended in time.
INSTANT = frozenset({"exact_match", "last_number"})


def find_reward(name: str, kwargs: Mapping[str, Any], section: str = "reward") -> Reward:
    """Return the reward named `name`: one of `REWARDS`, or `package.module.function`. `section` holds its keys.

    Raises:
        ConfigError: no such function.
    """
    function = _import(REWARDS.get(name, name), section)
    takes_problem = "problem" in inspect.signature(function).parameters

    def reward(response: str, problem: Problem) -> float | Awaitable[float]:
        own = {"problem": problem} if takes_problem else {}
        value: Any = function(response, problem.answer, **own, **kwargs)
        return _awaited(name, value) if inspect.isawaitable(value) else checked_reward(name, value)

    try:
        inspect.signature(function).bind("response", "answer", **{"problem": None} if takes_problem else {}, **kwargs)
    except TypeError as error:
        fix = "a reward is called as function(response, answer, **reward.kwargs)"
        raise ConfigError([Violation(f"{section}.kwargs", dict(kwargs), f"do not fit {name}: {error}", fix)]) from None
    return reward


async def _awaited(name: str, value: Awaitable[Any]) -> float:
    return checked_reward(name, await value)


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


def error_text(error: BaseException) -> str:
    """Return the error's text, cut to a readable length, since some errors quote the whole response."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."


def _import(path: str, section: str) -> Callable[..., Any]:
    module_name, _, attribute = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        fix = f"choose one of {', '.join(REWARDS)}, or give package.module.function of a function that can be imported"
        raise ConfigError(
            [Violation(f"{section}.name", path, f"cannot be imported: {error_text(error)}", fix)]
        ) from error
    if not callable(function):
        raise ConfigError([Violation(f"{section}.name", path, "is not a function", "name a function")])
    return function
