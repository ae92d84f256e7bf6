"""Rules about rewards and environments, by name or by the dotted path of a user's own."""

import ast
import importlib.util
import re
from collections.abc import Iterator

from nemo_rl_lite.config.schema import Config, RolloutAlgorithmConfig
from nemo_rl_lite.environments.registry import ENVIRONMENTS
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rewards.registry import REWARDS
from nemo_rl_lite.rules import code
from nemo_rl_lite.rules.base import rule

# Packages that a reward needs in addition to this one.
_PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}


@rule("reward.name", "reward.kwargs", options=RolloutAlgorithmConfig)
def reward_exists(config: Config) -> Iterator[Violation]:
    name = config.reward.name
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        fix = "bash scripts/install.sh"
        yield Violation("reward.name", name, f"the package {package} is not installed here", fix)
    if name in REWARDS:
        return
    fix = f"choose one of {', '.join(REWARDS)}, or package.module.function of your own"
    found = code.find(name) if "." in name else code.Found("no such reward")
    if found.trouble:
        yield Violation("reward.name", name, found.trouble, fix)
    elif isinstance(found.definition, ast.AsyncFunctionDef):
        yield Violation("reward.name", name, "is a coroutine (async def)", "an ordinary function")
    elif isinstance(found.definition, ast.FunctionDef):
        yield from _takes_a_response(config, found.definition)


def _takes_a_response(config: Config, function: ast.FunctionDef) -> Iterator[Violation]:
    name, kwargs, own = config.reward.name, config.reward.kwargs, code.parameters(function)
    call = "a reward is called as function(response, answer, **reward.kwargs), and returns one number"
    if {"prompts", "completions"} & set(own):
        rule_text = "has the signature of TRL's rewards, which judge lists"
        fix = "def reward(response, answer): ...; with a parameter `problem` it also gets messages and columns"
        yield Violation("reward.name", name, rule_text, fix)
    elif trouble := code.misfit(function, 2, kwargs | ({"problem": None} if "problem" in own else {})):
        yield Violation("reward.kwargs", dict(kwargs), f"do not fit {name}: {trouble}", call)


@rule("reward.name", "data.name", options=RolloutAlgorithmConfig)
def task_scores_its_own_problems(config: Config) -> Iterator[Violation]:
    if config.reward.name == "reasoning_gym" and config.data.name != "reasoning_gym":
        fix = "data=reasoning_gym, or reward=math or another"
        yield Violation("reward.name", "reasoning_gym", "scores the problems of data=reasoning_gym alone", fix)


@rule("reward.name", "reward.kwargs", options=RolloutAlgorithmConfig)
def format_is_a_pattern(config: Config) -> Iterator[Violation]:
    key, pattern = "reward.kwargs.pattern", config.reward.kwargs.get("pattern")
    if config.reward.name != "format":
        return
    fix = f"{key}='<answer>.*</answer>'"
    if not isinstance(pattern, str):
        yield Violation(key, pattern, "must be a regular expression", fix)
        return
    try:
        re.compile(pattern)
    except re.error as error:
        yield Violation(key, pattern, f"is no regular expression: {error}", fix)


@rule("environment.name", "environment.max_turns", options=RolloutAlgorithmConfig)
def environment_exists(config: Config) -> Iterator[Violation]:
    name, turns = config.environment.name, config.environment.max_turns
    if name is None and turns > 1:
        rule_text = "without an environment nothing is said between turns"
        yield Violation("environment.max_turns", turns, rule_text, f"environment={next(iter(ENVIRONMENTS))}")
    if name is None or name in ENVIRONMENTS:
        return
    found = code.find(name) if "." in name else code.Found("no such environment")
    if found.trouble:
        fix = f"choose one of {', '.join(ENVIRONMENTS)}, or package.module.Class of your own"
        yield Violation("environment.name", name, found.trouble, fix)
    elif isinstance(found.definition, ast.ClassDef) and _lacks_step(found.definition):
        rule_text, fix = "has no method step(problem, conversation)", "see nemo_rl_lite/environments/interface.py"
        yield Violation("environment.name", name, rule_text, fix)


def _lacks_step(definition: ast.ClassDef) -> bool:
    inherits = definition.bases or definition.keywords
    return not inherits and "step" not in code.members(definition)
