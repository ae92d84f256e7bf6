"""What a reward is: one finite number, or an error that says why a sample has none."""

import math
from contextlib import suppress
from numbers import Real
from typing import Any

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
