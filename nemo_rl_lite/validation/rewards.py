"""Rules about rewards, environments and agents. User code is imported; a run also calls it once before it starts."""

import logging
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any

from pydantic import ValidationError

from nemo_rl_lite.config.algorithms import has_teacher
from nemo_rl_lite.config.schema import AgentConfig, Config, DataConfig
from nemo_rl_lite.config.schema_algorithm import GRPOConfig, RolloutAlgorithmConfig
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.data.formats import PROBLEMS
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.rows import file_rows
from nemo_rl_lite.data.sources import ROWS
from nemo_rl_lite.environments.registry import ENVIRONMENTS
from nemo_rl_lite.errors import ConfigError, DataError, Violation
from nemo_rl_lite.rewards.judge import Term, terms_of
from nemo_rl_lite.rewards.llm_judge import JudgeOptions
from nemo_rl_lite.rewards.registry import BINARY, NONE, REWARDS, find_batch_reward, find_reward
from nemo_rl_lite.validation.compose import described, rule

log = logging.getLogger(__name__)

# These rewards compare a response with the answer of its row.
_COMPARING = ("exact_match", "last_number", "math")
HELD_OUT_REWARD = "held-out reward"
_HARNESSES = "nemo_rl_lite.environments.harnesses."
# These environments answer a turn, so they need a later one.
_ANSWERING = ("calculator", "tools", "python")


@rule("reward", options=RolloutAlgorithmConfig, of_sources=True)
def check_reward(config: Config) -> Iterator[Violation]:
    terms = terms_of(config.reward)
    for number, term in enumerate(terms):
        if term.name == "judge":
            yield from _judge(term, config.reward.timeout_s)
        elif term.name not in REWARDS:
            yield from _own_reward(term)
        if term.label in [other.label for other in terms[:number]]:
            rule_text = f"{term.label} is also the name of the main reward"
            yield Violation(term.section, term.name, rule_text, f"reward.terms.{term.label}_2...")


def _own_reward(term: Term) -> Iterator[Violation]:
    key = f"{term.section}.name"
    if "." not in term.name:
        fix = f"one of {', '.join(REWARDS)}, or your own package.module.function or path/to/file.py:function"
        yield Violation(key, term.name, "no such reward", fix)
        return
    try:
        (find_reward if term.batch_size is None else find_batch_reward)(term.name, term.kwargs, term.section)
    except ConfigError as error:
        yield from error.violations


def _judge(term: Term, timeout_s: float | None) -> Iterator[Violation]:
    section = f"{term.section}.kwargs"
    if "api_key" in term.kwargs:
        rule_text = "is a secret, and configurations are written to files"
        yield Violation(f"{section}.api_key", None, rule_text, f"{section}.api_key_env=NAME_OF_A_VARIABLE")
        return
    try:
        JudgeOptions(**term.kwargs)
    except ValidationError as error:
        known = [f"{section}.{one.name}" for one in fields(JudgeOptions)]
        for details in error.errors(include_url=False):
            yield described({**details, "loc": (*section.split("."), *details["loc"])}, [section, *known])
    if timeout_s is None:
        rule_text = "a judge needs its own process, and so a timeout"
        yield Violation("reward.timeout_s", None, rule_text, "reward.timeout_s=300")


@rule("reward", "data", "environment", "agent", options=RolloutAlgorithmConfig, of_sources=True)
def check_reward_fits_data(config: Config) -> Iterator[Violation]:
    terms, data = terms_of(config.reward), config.data
    for term in terms:
        if term.name == "reasoning_gym" and data.name != "reasoning_gym":
            rule_text, fix = "needs data=reasoning_gym", "data=reasoning_gym, or another reward"
            yield Violation(f"{term.section}.name", term.name, rule_text, fix)
    needing = [term for term in terms if term.name in _COMPARING]
    if data.answer_column is None and data.name in ROWS and _is_judged(config) and needing:
        rule_text = f"is null, and {needing[0].section}.name = {needing[0].name} needs answers"
        fix = "data.answer_column=answer, or a reward without answers: reward=format or reward=judge"
        yield Violation("data.answer_column", None, rule_text, fix)


@rule("reward", "data", "environment", "agent", options=RolloutAlgorithmConfig, of_sources=True)
def check_answers(config: Config) -> Iterator[Violation]:
    """Score the answers of a file's first rows as responses. An answer that fails is one that no response can match."""
    data = config.data
    terms = [term for term in terms_of(config.reward) if term.name in _COMPARING]
    if data.name != "file" or data.answer_column is None or not terms or not _is_judged(config):
        return
    for path in filter(None, (data.train_path, data.validation_path)):
        for term in terms:
            problems = _first_problems(data, path)
            wrong = [found for found in (_unequal(term, *one) for one in problems) if found]
            if not wrong:
                continue
            rule_text = f"{wrong[0]}; {len(wrong)} of the first {len(problems)} rows have this problem"
            fix = "correct or remove these rows, or data.answer_pattern, or another reward"
            if len(wrong) > config.reward.max_failure_fraction * len(problems):
                yield Violation(f"{term.section}.name", term.name, rule_text, fix)
            else:
                log.warning("%s.name = %s: %s (%s)", term.section, term.name, rule_text, fix)


def _first_problems(data: DataConfig, path: str) -> list[tuple[str, Problem]]:
    """Return problems and the names of their rows; none if `check_rows` refuses them."""
    try:
        read = [(where, PROBLEMS.from_row(data, row, where)) for where, row in islice(file_rows(path), 100)]
    except DataError:
        return []
    return [(where, one) for where, one in read if isinstance(one, Problem)]


def _unequal(term: Term, where: str, problem: Problem) -> str:
    """Return the reason if an answer does not get reward 1 as a response; else an empty text."""
    try:
        reward = find_reward(term.name, term.kwargs, term.section)(problem.answer, problem)
    except ValueError as error:
        return f"{where}: {error}"
    return "" if reward == 1 else f"{where}: the answer {problem.answer!r} is not equal to itself"


@rule("reward", "algorithm", "environment", "agent", options=GRPOConfig, of_sources=True)
def check_reward_present(config: Config) -> Iterator[Violation]:
    learns = not has_teacher(config) or getattr(config.options(GRPOConfig).loss_fn, "reward_coef", 0) > 0
    if learns and _is_judged(config) and all(term.name == NONE for term in terms_of(config.reward)):
        rule_text = "needs a reward, and reward=none is always 0"
        fix = "another reward, such as reward=exact_match, or algorithm=distillation"
        # Not a key of the reward: an evaluation without one learns nothing, and is allowed.
        yield Violation("algorithm.name", config.algorithm.name, rule_text, fix)


def held_out_label(values: Mapping[str, Any]) -> str:
    """Return the label of the mean reward on held-out problems: an accuracy only if every reward of every source is 0
    or 1. `values` has dotted keys."""
    sources = {key.split(".")[2] for key in values if key.startswith("data.sources.")}
    return "held-out accuracy" if all(map(_is_binary, _of_each(values, sources))) else HELD_OUT_REWARD


def _of_each(values: Mapping[str, Any], sources: Collection[str]) -> Sequence[Mapping[str, Any]]:
    """Return the values of each source, with the keys of a run; those of the run if there are no sources."""
    starts = [f"data.sources.{name}." for name in sources]
    own = [{key.removeprefix(start): one for key, one in values.items() if key.startswith(start)} for start in starts]
    return own or [values]


def _is_binary(values: Mapping[str, Any]) -> bool:
    binary = values.get("reward.binary")
    if binary is None:
        name, is_sum = values.get("reward.name"), any(key.startswith("reward.terms.") for key in values)
        by_reward = name in BINARY or (name == "program" and not values.get("reward.kwargs.share"))
        plays = values.get("agent.name") or values.get("environment.name") not in (None, *_ANSWERING)
        binary = by_reward and not is_sum and not plays
    return bool(binary)


def _is_judged(config: Config) -> bool:
    """Return whether only `reward` scores responses. Other environments and agents may do it themselves."""
    return config.agent.name is None and config.environment.name in (None, *_ANSWERING)


@rule("environment", "agent", options=RolloutAlgorithmConfig, of_sources=True)
def check_environment_and_agent(config: Config) -> Iterator[Violation]:
    environment, agent, turns = config.environment.name, config.agent.name, config.environment.max_turns
    if environment in _ANSWERING and turns == 1:
        rule_text = f"must be at least 2: environment={environment} answers the first turn"
        yield Violation("environment.max_turns", turns, rule_text, "2 or more")
    if environment is not None and environment not in ENVIRONMENTS:
        choices = f"one of {', '.join(ENVIRONMENTS)}, or package.module.Class or path/to/file.py:Class"
        yield from _own("environment.name", environment, choices)
    if agent is not None:
        yield from _own("agent.name", agent, "your own package.module.function or path/to/file.py:function")
    if agent is not None and environment is not None:
        rule_text = f"excludes environment.name = {environment}"
        yield Violation("agent.name", agent, rule_text, "environment=none, or agent.name=null")
    if harness_command(config.agent) == []:
        key, rule_text = "agent.kwargs.command", "must be a text with the program of the harness and its options"
        yield Violation(key, config.agent.kwargs["command"], rule_text, f"\"{key}='mini -c mini.yaml'\"")


def harness_command(agent: AgentConfig) -> list[str] | None:
    """Return the words of a harness's command, none if it is invalid. None if the configuration has no such command."""
    if agent.name is None or not agent.name.startswith(_HARNESSES) or "command" not in agent.kwargs:
        return None
    try:
        return shlex.split(agent.kwargs["command"])
    except (ValueError, AttributeError):  # a quote without end, or no text
        return []


def _own(key: str, path: str, fix: str) -> Iterator[Violation]:
    if "." not in path:
        yield Violation(key, path, "does not exist", fix)
        return
    try:
        imported(path)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        yield Violation(key, path, f"cannot be imported: {type(error).__name__}: {error}", fix)
