"""Rewards by the response's text alone, and by the scores of reasoning-gym's tasks, which need that package."""

import json
import math
import re
import unicodedata
from functools import cache
from typing import Any

from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.rewards.answers import final_text
from nemo_rl_lite.rewards.numbers import last_number_in, read_number


def exact_match(response: str, answer: str) -> float:
    """Return 1 if what follows the thoughts equals the answer without blanks at the ends and in one Unicode form, else
    0."""
    final = final_text(response)
    return float(final is not None and _composed(final.strip()) == _composed(answer.strip()))


def format_match(response: str, answer: str, pattern: str) -> float:
    """Return 1 if the whole stripped response matches the pattern, else 0; a dot matches newlines too."""
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def nothing(response: str, answer: str) -> float:
    """Return 0."""
    return 0.0


def last_number(response: str, answer: str) -> float:
    """Return 1 if the last number that follows the thoughts is the answer, else 0.

    Raises:
        ValueError: the answer is not a number.
    """
    expected = read_number(answer)
    if expected is None:
        raise ValueError(f"the reference answer {answer!r} is not a number")
    number = last_number_in(final_text(response) or "")
    return float(number is not None and number.equals(expected))


# Languages have a few on a letter.
_MOST_ACCENTS = 30


def _composed(text: str) -> str:
    """Return the text in one Unicode form. One with many accents on a letter, which takes quadratic time, stays."""
    run = 0
    for letter in "" if text.isascii() else text:
        run = run + 1 if unicodedata.combining(letter) else 0
        if run > _MOST_ACCENTS:
            return text
    return unicodedata.normalize("NFC", text)


def task_score(response: str, answer: str, problem: Problem, answer_tag: str | None) -> float:
    """Return the task's score of what follows the thoughts, between 0 and 1; 0 where the scorer cannot read it. With
    `answer_tag`, score the text between `<tag>` and `</tag>`; without that tag the score is 0.

    Raises:
        KeyError: the problem does not come from data=reasoning_gym.
    """
    from reasoning_gym.utils import extract_answer

    final, entry = final_text(response), problem.metadata["entry"]
    found = extract_answer(final or "", answer_tag) if answer_tag else final
    if found is None:
        return 0.0
    scorer = _scorer(problem.metadata["task"], json.dumps(problem.metadata["task_kwargs"], sort_keys=True))
    try:
        score = float(scorer.score_answer(found.strip(), entry))
    except Exception:  # scorers raise anything on malformed answers; one that fails on the task's own answer is broken
        scorer.score_answer(entry["answer"], entry)
        return 0.0
    return 0.0 if math.isnan(score) else score


@cache
def _scorer(task: str, arguments: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, **json.loads(arguments), size=1)
