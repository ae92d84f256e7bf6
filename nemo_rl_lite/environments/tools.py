"""Environments that offer tools: a base class, plain functions, Python in the sandbox, and a calculator."""

import ast
import asyncio
import inspect
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from nemo_rl_lite.config.user_code import imported, own_name
from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.system.sandbox import Limits, run_python
from nemo_rl_lite.system.user_errors import as_call_error, report_once

# Threads for plain functions. They start on demand; environment.concurrency is the limit.
_THREADS = ThreadPoolExecutor(4096, thread_name_prefix="tool")


class EpisodeError(Exception):
    """A tool's error that the model cannot fix: the episode fails."""


class ToolEnvironment(ABC):
    """Answers the tool calls of a turn sequentially, each with a message of the role `tool`. A turn without a call ends
    the episode. The model reads the error of an invalid call or of a tool that raises. A fault in a tool's code, such
    as a misspelt name, ends the run.

    `tools`, the functions that every prompt offers, is a list in OpenAI's format. If it is empty, rows have their own.
    """

    tools: Sequence[Tool] = ()

    @abstractmethod
    async def call(self, problem: Problem, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the tool's answer, which is converted by `str`. The model reads its errors, except EpisodeErrors."""

    async def finish(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """End the episode after a turn without a call. By default there is no reward."""
        return Observation(done=True)

    async def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """See `Environment.step`."""
        calls = conversation[-1].get("tool_calls", ())
        if not calls:
            return await self.finish(problem, conversation)
        return Observation(tuple([await self._answer(problem, call) for call in calls]))

    async def _answer(self, problem: Problem, call: Mapping[str, Any]) -> Message:
        name, wrong = call["function"]["name"], call.get("error")
        if wrong:
            answer = f"error: {wrong}"
        else:
            try:
                answer = str(await self.call(problem, name, call["function"]["arguments"]))
            except EpisodeError:
                raise
            except (Exception, SystemExit) as error:  # a user's tool may raise anything
                raised = as_call_error(error)
                # The model decides the types of arguments, and so which attributes they have.
                if raised.is_fault and not isinstance(error, AttributeError):
                    raise
                answer = f"error: {raised}"
                # Users should see a mistake in the tool, too.
                report_once(f"the tool {name} raised, and the model reads the error", error)
        return {"role": "tool", "content": answer, "name": name, "tool_call_id": call["id"]}


class _Stateless:
    """An environment whose objects keep nothing between two steps."""

    def state(self) -> None: ...

    def restore(self, state: None) -> None: ...


class Functions(_Stateless, ToolEnvironment):
    """Offers user functions. Their signatures and docstrings become schemas."""

    def __init__(self, tools: Sequence[str], max_characters: int):
        """`max_characters`: limit of an answer. Raises ValueError: there are no functions, two have the same name, or
        one is not a function."""
        if not tools:
            raise ValueError("tools names no function")
        self._functions: dict[str, Callable[..., Any]] = {}
        for path in tools:
            function, name = imported(path), own_name(path)
            if not callable(function) or name in self._functions:
                raise ValueError(f"{path} is not a function, or another tool has its name")
            self._functions[name] = function
        self._max_characters = max_characters

    @cached_property
    def tools(self) -> Sequence[Tool]:  # pyrefly: ignore[bad-override]
        """Schemas of the functions. Raises ValueError: a function lacks a type or a description."""
        return [_schema(name, function) for name, function in self._functions.items()]

    async def call(self, problem: Problem, name: str, arguments: Mapping[str, Any]) -> str:
        return shortened(str(await called(self._functions[name], **arguments)), self._max_characters)


async def called(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function. A plain function runs in a thread, so that other episodes continue."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    answer = await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: function(*arguments, **named))
    return await answer if inspect.isawaitable(answer) else answer


def shortened(text: str, most: int) -> str:
    """Return the first `most` characters of a text, and the number of missing ones."""
    return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most} more characters]"


def _schema(name: str, function: Callable[..., Any]) -> Tool:
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # several types, some without a public name
        rule = "a tool needs a type for each argument, and a docstring with a line per argument below `Args:`"
        raise ValueError(f"{name}: {error} ({rule})") from error
    schema["function"].pop("return", None)
    schema["function"]["name"] = name
    return schema


_BLOCK = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL)
_CODE = {"type": "string", "description": "The code. What it prints is the answer."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code. Each call starts afresh, without the variables of earlier ones.",
        "parameters": {"type": "object", "properties": {"code": _CODE}, "required": ["code"]},
    },
}


class Python(_Stateless, ToolEnvironment):
    """Offers the tool `python(code)`. With `call="block"`, the last fenced Python block of a turn is the call, and a
    user message has the answer. Any model can use that."""

    def __init__(self, call: str, seconds: float, memory_mib: int, max_characters: int):
        """Set a call's limits on time, memory and output. Raises ValueError: `call` is neither `tool` nor `block`, or a
        limit is not positive."""
        if call not in ("tool", "block"):
            raise ValueError(f"call must be tool or block, not {call!r}")
        if min(seconds, memory_mib, max_characters) <= 0:
            raise ValueError("seconds, memory_mib and max_characters must be positive")
        self.tools: Sequence[Tool] = [_TOOL] if call == "tool" else []
        # A character has up to four bytes.
        self._limits, self._most = Limits(seconds, memory_mib, output=4 * max_characters + 4), max_characters

    async def call(self, problem: Problem, name: str, arguments: Mapping[str, Any]) -> str:
        return await self._run(arguments["code"])

    async def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """See `Environment.step`."""
        blocks = () if self.tools else _BLOCK.findall(conversation[-1]["content"])
        if not blocks:
            return await super().step(problem, conversation)
        return Observation(({"role": "user", "content": await self._run(blocks[-1])},))

    async def _run(self, code: str) -> str:
        ran = await called(run_python, code, limits=self._limits)
        said = [shortened(ran.output.rstrip(), self._most)] if ran.output.strip() else []
        if ran.status is None:
            said.append(f"error: the code {ran.excess(self._limits)}")
        elif ran.status < 0:
            said.append(f"error: signal {-ran.status} ended the code")
        return "\n".join(said) or "[nothing was printed]"


_BEGIN, _END = "<calc>", "</calc>"
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
# Values are limited and powers are left out, because results could grow without bound.
_LARGEST = 10**30
_LONGEST = 200


class Calculator(_Stateless):
    """Answers `<calc>EXPRESSION</calc>` with the value. A turn without a call ends the episode."""

    def __init__(self, role: str):
        if role not in ("user", "tool"):
            raise ValueError(f"role must be user or tool, not {role!r}")
        self._role = role

    def step(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """Answer with the value or the error of the last expression."""
        call, said = None, conversation[-1]["content"]
        begin = said.find(_BEGIN)
        while begin >= 0 and (end := said.find(_END, begin)) >= 0:
            call = said[begin + len(_BEGIN) : end]
            begin = said.find(_BEGIN, end)
        if call is None:
            return Observation(done=True)
        return Observation(({"role": self._role, "content": calculate(call)},))


def calculate(expression: str) -> str:
    """Return the value of +, -, *, /, //, % and parentheses over numbers, or a text that begins with `error`."""
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
