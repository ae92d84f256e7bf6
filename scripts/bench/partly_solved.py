"""A reward for dynamic_sampling.py: rows whose column `solved` is true are always right."""

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.rewards.text import exact_match


def partly_solved(response: str, answer: str, problem: Problem) -> float:
    return 1.0 if problem.metadata["solved"] else exact_match(response, answer)
