"""Rules about the keyword arguments of rewards, environments, agents and losses: their types, by the annotations of
what takes them, and the ranges of the built-in ones."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_lite.config.algorithms import ALGORITHMS
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.user_code import own_name
from nemo_rl_lite.data.columns import is_number
from nemo_rl_lite.environments.registry import ENVIRONMENTS
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rewards.judge import terms_of
from nemo_rl_lite.rewards.registry import REWARDS
from nemo_rl_lite.rules import code
from nemo_rl_lite.rules.base import rule

# The types that a command's value can be mistaken for, what Python may give for each, and how to name them.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "None": ((type(None),), "null"),
}
# Python itself does not start with less.
_LEAST_MIB = 64


@rule("reward", options=RolloutAlgorithmConfig)
def rewards_take_their_arguments(config: Config) -> Iterator[Violation]:
    for term in terms_of(config.reward):
        yield from _of_other_types(f"{term.section}.kwargs", REWARDS.get(term.name, term.name), term.kwargs)


@rule("environment", options=RolloutAlgorithmConfig)
def environments_take_their_arguments(config: Config) -> Iterator[Violation]:
    name = config.environment.name
    if name is not None:
        yield from _of_other_types("environment.kwargs", ENVIRONMENTS.get(name, name), config.environment.kwargs)


@rule("agent", options=RolloutAlgorithmConfig)
def agents_take_their_arguments(config: Config) -> Iterator[Violation]:
    if config.agent.name is not None:
        yield from _of_other_types("agent.kwargs", config.agent.name, config.agent.kwargs)


@rule("algorithm.loss", "algorithm.loss_kwargs")
def losses_take_their_arguments(config: Config) -> Iterator[Violation]:
    path = config.algorithm.loss or ALGORITHMS[config.algorithm.name].loss
    yield from _of_other_types("algorithm.loss_kwargs", path, config.algorithm.loss_kwargs)


@rule("reward", "environment", options=RolloutAlgorithmConfig)
def programs_have_limits(config: Config) -> Iterator[Violation]:
    """Yield the limits of the sandbox that leave a program nothing, or that another limit makes void."""
    reward, environment = config.reward, config.environment
    for term in terms_of(reward):
        if term.name == "program":
            yield from _limits(f"{term.section}.kwargs", term.kwargs, "reward.timeout_s", reward.timeout_s)
    if environment.name == "python":
        yield from _limits("environment.kwargs", environment.kwargs, "environment.timeout_s", environment.timeout_s)


def _limits(section: str, kwargs: Mapping[str, Any], whole: str, whole_s: float | None) -> Iterator[Violation]:
    """`whole`: the key that limits all that is run for a sample or a turn, and `whole_s` its seconds."""
    seconds, memory = kwargs.get("seconds"), kwargs.get("memory_mib")
    if is_number(seconds) and seconds <= 0:
        rule_text = "leaves a program no time, so that none would pass"
        yield Violation(f"{section}.seconds", seconds, rule_text, f"{section}.seconds=10.0")
    elif is_number(seconds) and whole_s is not None and seconds >= whole_s:
        rule_text = f"is for each program that is run, and {whole} = {whole_s:g} ends all of them before that"
        fix = f"{section}.seconds={whole_s / 2:g}, or {whole}={6 * seconds:g}"
        yield Violation(f"{section}.seconds", seconds, rule_text, fix)
    if is_number(memory) and memory < _LEAST_MIB:
        rule_text = f"is in MiB, of which Python itself needs some: below {_LEAST_MIB} programs would fail"
        yield Violation(f"{section}.memory_mib", memory, rule_text, f"{section}.memory_mib=1024")


@dataclass(frozen=True)
class Misfit:
    """The types that a value should have, in words, and an example of one."""

    kinds: str
    example: str


def misfit_of_type(value: Any, annotation: str) -> Misfit | None:
    """Return what a value should be, by an annotation of Python; None where it is that, or the annotation has other
    types than `_TYPES`. Any text is true in Python, `no` as well."""
    wanted = [part.strip() for part in annotation.split("|")]
    if wanted == ["None"] or not all(part in _TYPES for part in wanted) or any(_is_a(value, one) for one in wanted):
        return None
    return Misfit(" or ".join(dict.fromkeys(_TYPES[one][1] for one in wanted)), _example(wanted[0], value))


def _of_other_types(section: str, path: str, kwargs: Mapping[str, Any]) -> Iterator[Violation]:
    """The keyword arguments whose type is not the one that the function or class at a dotted path says."""
    annotations = _annotations(code.find(path).definition) if kwargs and "." in path else {}
    for name, value in kwargs.items():
        if name in annotations and (misfit := misfit_of_type(value, annotations[name])):
            key = f"{section}.{name}"
            yield Violation(key, value, f"must be {misfit.kinds}, as {own_name(path)} says", f"{key}={misfit.example}")


def _annotations(definition: ast.AST | None) -> dict[str, str]:
    """The annotations of a function's or class's parameters; one with the default None may be None, too."""
    if isinstance(definition, ast.ClassDef):
        definition = code.members(definition).get("__init__")
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return {}
    own = definition.args
    places = (*own.posonlyargs, *own.args)
    defaults = [*[None] * (len(places) - len(own.defaults)), *own.defaults, *own.kw_defaults]
    return {
        one.arg: ast.unparse(one.annotation) + " | None" * _is_none(default)
        for one, default in zip((*places, *own.kwonlyargs), defaults, strict=True)
        if one.annotation is not None
    }


def _is_none(default: ast.expr | None) -> bool:
    return isinstance(default, ast.Constant) and default.value is None


def _is_a(value: Any, name: str) -> bool:
    types, _ = _TYPES[name]
    # In Python, true and false are integers.
    return isinstance(value, types) and (name == "bool" or not isinstance(value, bool))


def _example(name: str, value: Any) -> str:
    if name != "bool":
        return "N, without a unit"
    return "false" if str(value).lower() in ("no", "off", "false", "n", "0") else "true"
