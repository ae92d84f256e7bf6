"""Judge a whole rollout: in this process, or in others with a time limit for each sample."""

import sys
from collections.abc import Callable, Sequence

from nemo_rl_lite.config.schema import RewardConfig
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.rewards.pool import JudgePool, Verdict
from nemo_rl_lite.rewards.registry import INSTANT, Reward, RewardError, WrongReward, error_text, find_reward

Judge = Callable[[Sequence[str], Sequence[Problem]], list[Verdict]]
"""Returns a verdict for each pair of response and problem: a reward, or the error that prevented it."""


def make_judge(config: RewardConfig) -> Judge:
    """Return the judge for the configured reward.

    Raises:
        ConfigError: there is no such reward, or it does not take `reward.kwargs`.
    """
    reward = find_reward(config.name, config.kwargs)
    if config.timeout_s is None or config.name in INSTANT:
        return one_by_one(reward)
    return JudgePool(config, config.timeout_s)


def one_by_one(reward: Reward) -> Judge:
    """Judge in this process, without a time limit."""

    def verdict(response: str, problem: Problem) -> Verdict:
        try:
            return reward(response, problem)
        except RewardError as error:
            return error
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            failure = RewardError(error_text(error))
            failure.__cause__ = error
            return failure

    return lambda responses, problems: [verdict(*pair) for pair in zip(responses, problems, strict=True)]


def try_reward(judge: Judge, problem: Problem) -> None:
    """Judge one sample before a run starts anything: the problem's own answer, as the response. Where that fails, say
    so: the error may be due to this response.

    Raises:
        ConfigError: the reward returns what is no reward.
    """
    (verdict,) = judge([problem.answer or ""], [problem])
    if isinstance(verdict, WrongReward):
        fix = "a function (response, answer, **reward.kwargs) that returns one number for one response"
        sample = f"on the response {problem.answer!r} to {problem.messages[-1]['content']!r:.80}"
        raise ConfigError([Violation("reward.name", None, f"{verdict} ({sample})", fix)])
    if isinstance(verdict, RewardError):
        told = " ".join(str(verdict).split())
        sys.stderr.write(f"note: a trial call of the reward failed: {told}; such samples are left out\n")
