"""Rewards: a function `(response, answer, **kwargs) -> float`, named here or by a dotted path of the user's own."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl_lite.errors import ConfigError, Violation

Reward = Callable[..., float]


def exact_match(response: str, answer: str) -> float:
    """1 where the response is the answer, outer whitespace apart."""
    return float(response.strip() == answer.strip())


REWARDS: dict[str, Reward] = {"exact_match": exact_match}


def find_reward(name: str, kwargs: Mapping[str, Any]) -> Reward:
    """The reward named `name`: one of `REWARDS`, or `package.module.function`.

    Raises:
        ConfigError: no such function.
    """
    function = REWARDS.get(name) or _import(name)
    try:
        inspect.signature(function).bind("response", "answer", **kwargs)
    except TypeError as error:
        fix = "a reward is called as function(response, answer, **reward.kwargs)"
        raise ConfigError([Violation("reward.kwargs", dict(kwargs), f"do not fit {name}: {error}", fix)]) from None
    return lambda response, answer: float(function(response, answer, **kwargs))


def _import(path: str) -> Reward:
    module_name, _, attribute = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # a user's module may raise anything while it is imported
        fix = f"choose one of {', '.join(REWARDS)}, or give package.module.function of a function that can be imported"
        raise ConfigError([Violation("reward.name", path, f"cannot be imported: {error}", fix)]) from error
    if not callable(function):
        raise ConfigError([Violation("reward.name", path, "is not a function", "name a function")])
    return function
