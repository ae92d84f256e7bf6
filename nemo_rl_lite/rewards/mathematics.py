"""Rewards by the value of a mathematical expression, compared by the math-verify package."""

import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

# math-verify warns that its time limits are off. They work in a main thread only, and only between two steps of the
# interpreter; the judging process has a time limit that always works (host/calls.py).
logging.getLogger("math_verify").setLevel(logging.ERROR)

# A percent sign begins a LaTeX comment unless it is escaped.
_PERCENT, _ESCAPED = re.compile(r"(?<!\\)%"), r"\\%"
_MARKS = ("$", "\\boxed", "\\(", "\\[")
_BOXED = "\\boxed{"
_MARKED = re.compile(r"(?<!\\)\$\$.+?\$\$|(?<!\\)\$.+?(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
# The minus sign of typography.
_MINUS = "\N{MINUS SIGN}"


def same_value(response: str, answer: str) -> float:
    """Return 1 where the last expression of the response equals the answer, else 0. That is the last `\\boxed{...}`, or
    without one the last between `$` or other marks of LaTeX, or without those a number or the last word.

    Raises:
        ValueError: the answer is not a mathematical expression. math-verify's own errors pass through.
    """
    reference = _reference(answer)
    return float(any(_equal(reference, text) for text in _last_expressions(response.replace(_MINUS, "-"))))


def _equal(reference: list[Any], text: str) -> bool:
    parsed = parse(text, parsing_timeout=0, raise_on_error=True)
    return verify(reference, parsed, timeout_seconds=0, raise_on_error=True)


def _last_expressions(response: str) -> Iterator[str]:
    """The texts that may be the response's last expression. math-verify itself would make a set of neighbours."""
    if (start := response.rfind(_BOXED)) >= 0:
        yield _BOXED + response[start + len(_BOXED) :][: _closing(response[start + len(_BOXED) :])]
    elif marked := list(_MARKED.finditer(response)):
        yield marked[-1][0]
        # The marks may be dollars of money.
        yield response[marked[-1].end() :]
    else:
        yield response
        # math-verify finds numbers in plain text, but not a letter, a pair or a percentage.
        for word in (response.strip(), response.strip().rpartition(" ")[2]):
            yield _boxed(word.rstrip("."))


def _closing(text: str) -> int:
    """The number of characters up to and including the brace that closes one before the text; all without one."""
    depth = 1
    for place, character in enumerate(text):
        escaped = place and text[place - 1] == "\\"
        depth += 0 if escaped else (character == "{") - (character == "}")
        if not depth:
            return place + 1
    return len(text)


def _boxed(expression: str) -> str:
    return f"{_BOXED}{_PERCENT.sub(_ESCAPED, expression)}}}"


@lru_cache(maxsize=4096)
def _reference(answer: str) -> list[Any]:
    # math-verify finds LaTeX between marks only; in an unmarked \frac{1}{2} it would find just the 2.
    marked = answer if any(mark in answer for mark in _MARKS) else _boxed(answer.replace(_MINUS, "-"))
    parsed = parse(marked, parsing_timeout=0, raise_on_error=True)
    if not parsed:
        raise ValueError(f"the reference answer {answer!r} is not a mathematical expression")
    return parsed
