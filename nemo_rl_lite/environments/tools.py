"""Environments that offer tools: a base class, and one whose tools are plain functions."""

import asyncio
import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any

from nemo_rl_lite.data.problems import Message, Problem
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.host.pool import as_call_error

# Plain functions run in threads, which start as they are needed; environment.concurrency is the limit.
_THREADS = ThreadPoolExecutor(4096, thread_name_prefix="tool")


class EpisodeError(Exception):
    """Raised by `ToolEnvironment.call` where the model can do nothing about it: the episode has failed."""


class ToolEnvironment(ABC):
    """Answers the calls of a turn one after the other, each with a message of the role `tool`; a turn without a call
    ends the episode. A call that cannot be read or fits no tool, and one that raises, is answered by what is wrong.

    `tools`, the functions that every prompt offers, is a list in OpenAI's format or empty: then rows have their own.
    """

    tools: Sequence[Tool] = ()

    @abstractmethod
    async def call(self, problem: Problem, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the tool's answer; what is no text is written as `str` writes it. The model reads what it raises,
        except an EpisodeError."""

    async def finish(self, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """End the episode after a turn without a call; here without a reward of its own."""
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
                answer = f"error: {as_call_error(error)}"
                _report_once(name, type(error).__name__, str(as_call_error(error)))
        return {"role": "tool", "content": answer, "name": name, "tool_call_id": call["id"]}


class Functions(ToolEnvironment):
    """Offers functions by their dotted paths. Their signatures and docstrings become their schemas."""

    def __init__(self, tools: Sequence[str], max_characters: int):
        """An answer that is longer than `max_characters` loses its end.

        Raises:
            ValueError: there are no functions, two have one name, or one is no function.
        """
        if not tools:
            raise ValueError("tools names no function")
        self._functions = {path.rpartition(".")[2]: _function(path) for path in tools}
        if len(self._functions) < len(tools):
            raise ValueError("two tools have the same name")
        self._max_characters = max_characters

    @cached_property
    def tools(self) -> Sequence[Tool]:  # pyrefly: ignore[bad-override]
        """Only the launcher asks for them. Raises ValueError: a function lacks a type or a description."""
        return [_schema(name, function) for name, function in self._functions.items()]

    async def call(self, problem: Problem, name: str, arguments: Mapping[str, Any]) -> str:
        """See `ToolEnvironment.call`."""
        return shortened(str(await called(self._functions[name], **arguments)), self._max_characters)


async def called(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function: one that is plain in a thread of its own, so that other episodes go on."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    answer = await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: function(*arguments, **named))
    return await answer if inspect.isawaitable(answer) else answer


def shortened(text: str, most: int) -> str:
    """Return the text's first `most` characters, and how many are missing."""
    return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most} more characters]"


def _function(path: str) -> Callable[..., Any]:
    module_name, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(module_name), name)
    if not callable(function):
        raise ValueError(f"{path} is no function")
    return function


def _schema(name: str, function: Callable[..., Any]) -> Tool:
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # of several types, some without a public name
        rule = "a tool needs a type for each argument, a docstring, and a line for each argument below `Args:` in it"
        raise ValueError(f"{name}: {error} ({rule})") from error
    schema["function"].pop("return", None)
    schema["function"]["name"] = name
    return schema


@cache
def _report_once(name: str, kind: str, text: str) -> None:
    # The model reads it; a mistake in the tool is for people.
    sys.stderr.write(f"the tool {name} raised, and the model reads the error: {text}\n")
