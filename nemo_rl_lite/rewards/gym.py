"""The scoring that comes with each task of the reasoning-gym package."""

import json
from functools import cache
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.utils import extract_answer

from nemo_rl_lite.data.problems import Problem


def task_score(response: str, answer: str, problem: Problem, answer_tag: str | None) -> float:
    """Return the task's score of the stripped response, between 0 and 1. With `answer_tag`, score the text between
    `<tag>` and `</tag>`; the score is 0 where the tag is missing.

    Raises:
        KeyError: the problem does not come from data=reasoning_gym.
    """
    found = extract_answer(response, answer_tag) if answer_tag else response.strip()
    scorer = _scorer(problem.metadata["task"], json.dumps(problem.metadata["task_kwargs"], sort_keys=True))
    return float(scorer.score_answer(found, problem.metadata["entry"]))


@cache
def _scorer(task: str, arguments: str) -> Any:
    return create_dataset(task, **json.loads(arguments), size=1)
