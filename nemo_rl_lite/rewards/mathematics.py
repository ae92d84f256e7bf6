"""Rewards by the value of a mathematical expression, compared by the math-verify package."""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

# math-verify warns that its time limits are off. They work in a main thread only, and only between two steps of the
# interpreter; the judging process has a time limit that always works (system/pool.py).
logging.getLogger("math_verify").setLevel(logging.ERROR)

# A percent sign begins a LaTeX comment unless it is escaped.
_PERCENT, _ESCAPED = re.compile(r"(?<!\\)%"), r"\\%"
_MARKS = ("$", "\\boxed", "\\(", "\\[")
_BOXED = "\\boxed{"
# Single dollars are marks as in pandoc: no blank after the first or before the second, and no digit after the second,
# so that dollars of money are none.
_MARKED = re.compile(
    r"(?<!\\)\$\$.+?\$\$|(?<![\\$])\$(?=\S)(?:\\.|[^$\\])+(?<=\S)\$(?!\d)|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL
)
# A number, also within a unit or a percentage, or a single letter: what a last word is where it is the answer.
_EXPRESSION = re.compile(r".*\d.*|\(?[^\W\d_]\)?")
# The minus sign of typography.
_MINUS = "\N{MINUS SIGN}"


def same_value(response: str, answer: str) -> float:
    """Return 1 if the last expression of the response equals the answer, else 0. That is the last `\\boxed{...}`, or
    without one the last between `$` or other marks of LaTeX, or without those the last word if it is a letter or has a
    number, or else the last number, or the last word.

    Raises:
        ValueError: the answer is not a mathematical expression. math-verify's own errors pass through.
    """
    reference = _reference(answer)
    expression = _last_expression(response.replace(_MINUS, "-"))
    parsed = parse(expression, parsing_timeout=0, raise_on_error=True)
    return float(verify(reference, parsed, timeout_seconds=0, raise_on_error=True))


def _last_expression(response: str) -> str:
    """Find the expression that counts. math-verify itself would make a set of neighbours."""
    if (start := response.rfind(_BOXED)) >= 0:
        return _closed(response[start:])
    if marked := list(_MARKED.finditer(response)):
        return marked[-1][0]
    whole = response.strip().rstrip(".")
    if whole[:1] in ("(", "[", "{") and whole[-1:] in (")", "]", "}"):
        return _boxed(whole)
    # math-verify finds numbers in plain text, but not a letter or a percentage.
    last = whole.split()[-1].strip("*_`,;:\\$") if whole else ""
    is_last = _EXPRESSION.fullmatch(last) or not any(map(str.isdigit, whole))
    return _boxed(last) if is_last else whole


def _closed(text: str) -> str:
    """Return the text from `\\boxed{` to its closing brace; all of it without one."""
    depth = 1
    for place in range(len(_BOXED), len(text)):
        escaped = text[place - 1] == "\\"
        depth += 0 if escaped else (text[place] == "{") - (text[place] == "}")
        if not depth:
            return text[: place + 1]
    return text


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
