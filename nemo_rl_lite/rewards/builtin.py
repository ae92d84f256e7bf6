"""Rewards by the response's text alone, and by the scores of reasoning-gym's tasks, which need that package."""

import json
import re
import unicodedata
from functools import cache
from typing import Any

from nemo_rl_lite.data.problems import Problem

# A minus after a digit or a bracket is a subtraction, not a sign.
_NUMBER = re.compile(r"(?:(?<![\w)\]])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|(?<![\w.])\.\d+)")

# The minus sign of typography.
_MINUS = "\N{MINUS SIGN}"


def exact_match(response: str, answer: str) -> float:
    """Return 1 if response and answer are equal without blanks at the ends and in one Unicode form, else 0."""
    return float(_composed(response.strip()) == _composed(answer.strip()))


def format_match(response: str, answer: str, pattern: str) -> float:
    """Return 1 if the whole stripped response matches the pattern, else 0; a dot matches newlines too."""
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def nothing(response: str, answer: str) -> float:
    """Return 0."""
    return 0.0


def last_number(response: str, answer: str) -> float:
    """Return 1 if the last number in the response is the answer, else 0; thousands separators are ignored.

    Raises:
        ValueError: the answer is not a number.
    """
    numbers = _NUMBER.findall(response.replace(_MINUS, "-"))
    return float(bool(numbers) and _value(numbers[-1]) == _value(answer))


def _value(text: str) -> float:
    return float(text.replace(",", "").replace(_MINUS, "-"))


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
    """Return the task's score of the stripped response, between 0 and 1. With `answer_tag`, score the text between
    `<tag>` and `</tag>`; without that tag the score is 0.

    Raises:
        KeyError: the problem does not come from data=reasoning_gym.
    """
    from reasoning_gym.utils import extract_answer

    found = extract_answer(response, answer_tag) if answer_tag else response.strip()
    scorer = _scorer(problem.metadata["task"], json.dumps(problem.metadata["task_kwargs"], sort_keys=True))
    return float(scorer.score_answer(found, problem.metadata["entry"]))


@cache
def _scorer(task: str, arguments: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, **json.loads(arguments), size=1)
