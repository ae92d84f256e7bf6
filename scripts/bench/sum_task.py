"""The task of `trl_step.py grpo` and `verl_step.py`: sums and differences of one-digit numbers."""

import random
import re
from typing import Any


def sums(count: int) -> list[dict[str, Any]]:
    """Return questions for the sum or difference of two one-digit numbers."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        left, right, sign = draw.randint(0, 9), draw.randint(0, 9), draw.choice("+-")
        question = f"State the final answer to the following arithmetic problem: {left} {sign} {right} ="
        answer = left + right if sign == "+" else left - right
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": str(answer)})
    return rows


def is_right(response: str, answer: str) -> bool:
    """Return whether the last number of a response is its answer."""
    return re.findall(r"-?\d+", response)[-1:] == [answer]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return 1 for a right response and 0 for another, under the name and with the arguments of verl."""
    return float(is_right(solution_str, ground_truth))
