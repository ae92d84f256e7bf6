"""Rewards that look at the response's text alone."""

import re

# A minus after a digit or a bracket is a subtraction's.
_NUMBER = re.compile(r"(?:(?<![\w)\]])-)?\d+(?:,\d{3})*(?:\.\d+)?")


def exact_match(response: str, answer: str) -> float:
    """1 where the response is the answer, outer whitespace apart."""
    return float(response.strip() == answer.strip())


def format_match(response: str, answer: str, pattern: str) -> float:
    """1 where the whole response, outer whitespace apart, matches the pattern; a dot matches newlines too."""
    return float(re.fullmatch(pattern, response.strip(), re.DOTALL) is not None)


def last_number(response: str, answer: str) -> float:
    """1 where the last number in the response is the answer, thousands separators apart.

    Raises:
        ValueError: the answer is no number.
    """
    numbers = _NUMBER.findall(response)
    return float(bool(numbers) and _value(numbers[-1]) == _value(answer))


def _value(text: str) -> float:
    return float(text.replace(",", ""))
