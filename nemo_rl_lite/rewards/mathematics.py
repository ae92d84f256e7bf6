"""Rewards by the value of a mathematical expression, compared by the math-verify package."""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

# math-verify warns that its time limits are off. They work in a main thread only, and only between two steps of the
# interpreter; the judging process has a time limit that always works (rewards/pool.py).
logging.getLogger("math_verify").setLevel(logging.ERROR)

# A percent sign begins a LaTeX comment unless it is escaped.
_PERCENT, _ESCAPED = re.compile(r"(?<!\\)%"), r"\\%"
_MARKS = ("$", "\\boxed", "\\(", "\\[")


def same_value(response: str, answer: str) -> float:
    """Return 1 where the last expression of the response (in `$...$` or `\\boxed{...}`, or a plain number) equals the
    answer, else 0.

    Raises:
        ValueError: the answer is not a mathematical expression. math-verify's own errors pass through.
    """
    parsed = parse(response, parsing_timeout=0, raise_on_error=True)
    return float(verify(_reference(answer), parsed, timeout_seconds=0, raise_on_error=True))


@lru_cache(maxsize=4096)
def _reference(answer: str) -> list[Any]:
    # math-verify finds LaTeX between marks only; in an unmarked \frac{1}{2} it would find just the 2.
    marked = answer if any(mark in answer for mark in _MARKS) else f"\\boxed{{{_PERCENT.sub(_ESCAPED, answer)}}}"
    parsed = parse(marked, parsing_timeout=0, raise_on_error=True)
    if not parsed:
        raise ValueError(f"the reference answer {answer!r} is not a mathematical expression")
    return parsed
