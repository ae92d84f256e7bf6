"""Judge one response at a time: in this process, or in others with a time limit for each."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nemo_rl_lite.config.schema import RewardConfig
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import ConfigError, DataError, Violation
from nemo_rl_lite.host.calls import CallError, CallPool, StartError, Target
from nemo_rl_lite.rewards.registry import INSTANT, Reward, RewardError, WrongReward, error_text, find_reward

Verdict = float | RewardError
"""A reward, or the error that prevented it."""

Judge = Callable[[str, Problem], Awaitable[Verdict]]
"""Judges a response to a problem. Many may be judged at a time."""


def make_judge(config: RewardConfig) -> Judge:
    """Return the judge for the configured reward.

    Raises:
        ConfigError: there is no such reward, or it does not take `reward.kwargs`.
    """
    reward = find_reward(config.name, config.kwargs)
    if config.timeout_s is None or config.name in INSTANT:
        return in_this_process(reward)
    return _PooledJudge(config)


def in_this_process(reward: Reward) -> Judge:
    """Judge here, without a time limit."""

    async def judge(response: str, problem: Problem) -> Verdict:
        return verdict(reward, response, problem)

    return judge


def verdict(reward: Reward, response: str, problem: Problem) -> Verdict:
    """Call the reward; an error of its own becomes a `RewardError`."""
    try:
        return reward(response, problem)
    except RewardError as error:
        return error
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        failure = RewardError(error_text(error))
        failure.__cause__ = error
        return failure


class RewardCalls:
    """What a judging process holds."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]):
        self._reward = find_reward(name, kwargs)

    def judge(self, response: str, problem: Problem) -> Verdict:
        return verdict(self._reward, response, problem)


class _PooledJudge:
    """Judges in at most `reward.processes` processes, each sample within `reward.timeout_s`."""

    def __init__(self, config: RewardConfig):
        arguments = {"name": config.name, "kwargs": config.kwargs}
        path = f"{RewardCalls.__module__}.{RewardCalls.__qualname__}"
        self._name = config.name
        target = Target(path, arguments, "the judging process", "reward.timeout_s")
        self._pool = CallPool(target, config.processes, at_once=1, timeout_s=config.timeout_s)

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
