"""Judge one response at a time: in this process, or in others with a time limit for each."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_lite.config.schema import RewardConfig
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import ConfigError, DataError, Violation
from nemo_rl_lite.host.calls import CallError, CallPool, StartError, Target
from nemo_rl_lite.rewards.registry import INSTANT, Reward, RewardError, WrongReward, error_text, find_reward


@dataclass(frozen=True)
class Judged:
    """The reward of a response and, where it is a sum, its parts by name, before their weights."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


Verdict = Judged | RewardError
"""A reward, or the error that prevented it."""

Judge = Callable[[str, Problem], Awaitable[Verdict]]
"""Judges a response to a problem. Many may be judged at a time."""


@dataclass(frozen=True)
class Term:
    """One part of a reward; `name` and `kwargs` as `find_reward` has them, `section` the keys that hold them."""

    label: str
    name: str
    kwargs: Mapping[str, Any]
    weight: float
    section: str


def terms_of(config: RewardConfig) -> list[Term]:
    """The configured reward, with weight 1, and then those that are added to it."""
    first = Term(config.name.rpartition(".")[2], config.name, config.kwargs, 1.0, "reward")
    further = config.terms.items()
    return [first, *(Term(label, one.name, one.kwargs, one.weight, f"reward.terms.{label}") for label, one in further)]


def make_judge(config: RewardConfig) -> Judge:
    """Return the judge for the configured reward.

    Raises:
        ConfigError: there is no such reward, or it does not take its kwargs.
    """
    terms = terms_of(config)
    here = RewardCalls(terms)
    if config.timeout_s is None or all(term.name in INSTANT for term in terms):
        return here.judge
    return _PooledJudge(config, terms)


class RewardCalls:
    """The rewards of a process, which adds them up."""

    def __init__(self, terms: Sequence[Term]):
        """Raises ConfigError where there is no such reward."""
        self._terms = [(term, find_reward(term.name, term.kwargs, term.section)) for term in terms]

    async def judge(self, response: str, problem: Problem) -> Verdict:
        """Judge a response; an error of a reward becomes a `RewardError`."""
        parts, total = dict[str, float](), 0.0
        for term, reward in self._terms:
            part = await _called(reward, response, problem)
            if isinstance(part, RewardError):
                return part
            parts[term.label], total = part, total + term.weight * part
        return Judged(total, parts if len(parts) > 1 else {})


async def _called(reward: Reward, response: str, problem: Problem) -> float | RewardError:
    try:
        value = reward(response, problem)
        return value if isinstance(value, float) else await value
    except RewardError as error:
        return error
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        failure = RewardError(error_text(error))
        failure.__cause__ = error
        return failure


class _PooledJudge:
    """Judges in at most `reward.processes` processes, each sample within `reward.timeout_s`."""

    def __init__(self, config: RewardConfig, terms: Sequence[Term]):
        path = f"{RewardCalls.__module__}.{RewardCalls.__qualname__}"
        self._name = config.name
        target = Target(path, {"terms": terms}, "the judging process", "reward.timeout_s")
        self._pool = CallPool(target, config.processes, config.concurrency, config.timeout_s)

    async def __call__(self, response: str, problem: Problem) -> Verdict:
        """Raises DataError: the processes do not start."""
        try:
            return await asyncio.wrap_future(self._pool.submit("judge", response, problem))
        except StartError as error:
            raise DataError(f"reward.name = {self._name}: {error}") from error
        except CallError as error:
            return RewardError(str(error))


def try_reward(judge: Judge, problem: Problem) -> None:
    """Judge one sample before a run starts anything: the problem's own answer, as the response. Where that fails, say
    so: the error may be due to this response.

    Raises:
        ConfigError: the reward returns what is no reward.
    """

    async def trial() -> Verdict:
        return await judge(problem.answer or "", problem)

    said = asyncio.run(trial())
    if isinstance(said, WrongReward):
        fix = "a function (response, answer, **reward.kwargs) that returns one number for one response"
        sample = f"on the response {problem.answer!r} to {problem.messages[-1]['content']!r:.80}"
        raise ConfigError([Violation("reward.name", None, f"{said} ({sample})", fix)])
    if isinstance(said, RewardError):
        told = " ".join(str(said).split())
        sys.stderr.write(f"note: a trial call of the reward failed: {told}; such samples are left out\n")
