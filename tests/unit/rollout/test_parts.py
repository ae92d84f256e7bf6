"""The parts of a rollout's rewards, as advantages of several rewards need them."""

import math

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.rollout.episode import Episode, Rollout
from tests.unit.rollout.test_saved import chat

WEIGHTS = {"right": 1.0, "short": 0.1}


def episode(reward: float | None, **parts: float) -> Episode:
    made = Episode(Problem(chat("?"), "!"), [1], 1)
    made.reward, made.reward_parts = reward, parts
    return made


def test_parts_and_what_is_in_none_of_them():
    total = 0.0 + 1.0 * 0.3 + 0.1 * 0.7
    episodes = [episode(total, right=0.3, short=0.7), episode(total - 0.5, right=0.3, short=0.7)]
    first, second, rest = Rollout(episodes, 2, 0).parts_NB(WEIGHTS).tolist()
    assert (first, second) == ([0.3, 0.3], [0.7, 0.7])
    assert rest[0] == 0 and abs(rest[1] + 0.5) < 1e-12


def test_what_is_not_there_is_nan():
    parts = Rollout([episode(None), episode(2.0)], 2, 1).parts_NB(WEIGHTS)
    assert parts[:2].isnan().all() and math.isnan(parts[2, 0]) and parts[2, 1] == 2
