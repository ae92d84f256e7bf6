"""Rewards from the response's text, and from the scorers of reasoning-gym's tasks."""

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
    """Return 1 if the text after the reasoning equals the answer, else 0. Surrounding whitespace and Unicode forms do
    not count."""
    final = final_text(response)
    return float(final is not None and _composed(final.strip()) == _composed(answer.strip()))


def format_match(response: str, answer: str, pattern: str) -> float:
    """Return 1 if the stripped response matches the whole pattern, else 0. A dot matches newlines."""
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def nothing(response: str, answer: str) -> float:
    """Return 0."""
    return 0.0


def last_number(response: str, answer: str) -> float:
    """Return 1 if the last number after the reasoning is the answer, else 0. Raises ValueError: the answer is not a
    number."""
    expected = read_number(answer)
    if expected is None:
        raise ValueError(f"the reference answer {answer!r} is not a number")
    number = last_number_in(final_text(response) or "")
    return float(number is not None and number.equals(expected))


# More combining characters in a row occur in no language.
_MOST_ACCENTS = 30


def _composed(text: str) -> str:
    """Return the text in NFC. Long runs of combining characters take quadratic time, and stay unchanged."""
    run = 0
    for letter in "" if text.isascii() else text:
        run = run + 1 if unicodedata.combining(letter) else 0
        if run > _MOST_ACCENTS:
            return text
    return unicodedata.normalize("NFC", text)


def task_score(response: str, answer: str, problem: Problem, answer_tag: str | None) -> float:
    """Return the task's score of the text after the reasoning, from 0 to 1; 0 if it is malformed. With `answer_tag`,
    score the text between `<tag>` and `</tag>`; a missing tag scores 0.

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
    except Exception:  # scorers raise anything on malformed answers, but not on the task's own answer
        scorer.score_answer(entry["answer"], entry)
        return 0.0
    return 0.0 if math.isnan(score) else score


@cache
def _scorer(task: str, arguments: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, **json.loads(arguments), size=1)
