"""A calculator is a tool: the assistant writes `<calc>3 * (4 + 5)</calc>` and reads the value."""

import ast
import operator
import re
from collections.abc import Callable, Sequence

from nemo_rl_lite.data.problems import Message, Problem
from nemo_rl_lite.environments.interface import Observation

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
# Values are limited, because products of long numbers grow without bound; powers are left out for the same reason.
_LARGEST = 10**30
_LONGEST = 200


class Calculator:
    """Answers a turn that calls the tool with the value; a turn without a call is final."""

    def __init__(self, role: str):
        if role not in ("user", "tool"):
            raise ValueError(f"role must be user or tool, not {role!r}")
        self._role = role

    def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """Answer with the value of the last expression, or with what is wrong with it."""
        calls = _CALL.findall(conversation[-1]["content"])
        if not calls:
            return Observation(done=True)
        return Observation(({"role": self._role, "content": calculate(calls[-1])},))


def calculate(expression: str) -> str:
    """Return the value of +, -, *, /, //, % and parentheses over numbers; for anything else a text beginning with
    `error`."""
    try:
        if len(expression) > _LONGEST:
            raise ValueError("the expression is too long")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error.msg if isinstance(error, SyntaxError) else error}"
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else f"{value:.10g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            value = _BINARY[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case _:
            raise ValueError("only numbers, + - * / // % and parentheses are understood")
    if abs(value) > _LARGEST:
        raise ValueError("the value is too large")
    return value
