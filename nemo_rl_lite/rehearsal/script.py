"""A scripted policy: it answers rightly, wrongly, with tool calls, and in all the ways in which a model can fail."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nemo_rl_lite.data.formats import Conversation as Chat
from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.data.tools import Tool
from nemo_rl_lite.generation.interface import Completion, Conversation, Progress, Request, Requests
from nemo_rl_lite.rollout.episode import Episode

Turn = Literal[
    "answer",
    "wrong",
    "call",
    "broken call",
    "unknown tool",
    "empty",
    "cut off",
    "thoughts",
    "odd characters",
    "full length",
]
_ASKED: Message = {"role": "user", "content": "-"}
_ODD = '\U0001f642 **bold` \x07 { "a": [1, \u00e4\u0301 </tool_call> \\n'
_EXAMPLES = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}


@dataclass(frozen=True)
class Script:
    """The turns of an episode. The last one repeats."""

    name: str
    turns: Sequence[Turn]
    needs_tools: bool = False
    is_held: bool = False
    """Responses wait until the stage releases them."""


PLAIN = (Script("right answer", ["answer"]), Script("wrong answer", ["wrong"]))
"""Scripts that say whether tools are offered."""
TWICE = Script("repeated", ["wrong", "wrong", "answer"])
"""Played twice, with the same responses."""
SAME = Script("same problem", ["wrong"])
"""Played after a right answer to that problem."""
SLOW = Script("slow responses", ["answer"], is_held=True)
"""Played by several episodes at once."""
UNANSWERED = Script("no response", ["answer"], is_held=True)
"""The episode ends while it waits for its first response."""
KILLED = Script("killed", ["answer"], is_held=True)
"""The processes of user code are killed while it waits for its first response."""
AFTER_KILL = Script("after the kill", ["answer"])
CALLED = Script("tool, then answer", ["call", "answer"], needs_tools=True)
OTHERS = (
    CALLED,
    Script("tools forever", ["call"], needs_tools=True),
    Script("broken call", ["broken call", "answer"], needs_tools=True),
    Script("unknown tool", ["unknown tool", "answer"], needs_tools=True),
    Script("empty response", ["empty", "answer"]),
    Script("always empty", ["empty"]),
    Script("cut off", ["cut off", "answer"]),
    Script("thoughts", ["thoughts"]),
    Script("odd characters", ["odd characters", "answer"]),
    Script("wrong forever", ["wrong"]),
    Script("full length", ["full length"]),
)


class ScriptedRequests(Requests):
    """The policy of one episode."""

    are_in_work, unfinished_tokens = False, 0

    def __init__(self, script: Script, tokenizer: ChatTokenizer, mark: int):
        """`mark`: first of the numbers that wrong answers consist of."""
        self._script, self._tokenizer = script, tokenizer
        self._marks = itertools.count(mark)
        self._released = asyncio.Event()
        if not script.is_held:
            self._released.set()
        self.are_reached = False
        """True if a request has come."""
        self.episode: Episode
        self.texts: list[str] = []
        """The wrong answers so far."""

    def release(self) -> None:
        """Answer requests, also the held ones."""
        self._released.set()

    def submit_as_batch(self) -> AbstractContextManager[None]:
        """See `Requests.submit_as_batch`."""
        return nullcontext()

    async def sample(
        self, request: Request, conversation: Conversation | None = None, progress: Progress | None = None
    ) -> tuple[Completion, int]:
        """See `Requests.sample`."""
        self.are_reached = True
        await self._released.wait()
        done = sum(len(segment.turns) for segment in self.episode.segments)
        turn = self._script.turns[min(done, len(self._script.turns) - 1)]
        segment = next(one for one in self.episode.segments if one.history.conversation is conversation)
        most = request.sampling.max_new_tokens
        tokens = self._tokens(turn, segment.tools or self.episode.problem.tools, most)
        is_cut = turn == "cut off" or len(tokens) > most
        # Without the end token.
        tokens = np.asarray(tokens[:most] if turn != "cut off" else tokens[:-1][:most], np.int32)
        logprobs = np.full(len(tokens), -1.0, np.float32)
        completion = Completion(tokens, logprobs, "length" if is_cut else "stop", ((0, len(tokens)),))
        if progress is not None:
            progress(completion)
        return completion, 0

    def _tokens(self, turn: Turn, tools: Sequence[Tool], most: int) -> Sequence[int]:
        """Return the tokens of a turn, with an end token."""
        answer = self.episode.problem.answer or "done"
        match turn:
            case "answer":
                return self._said(answer)
            case "wrong" | "cut off":
                return self._said(self._wrong())
            case "thoughts":
                return self._said(f"<think>\n{self._wrong()}\n</think>\n\n{answer}")
            case "odd characters":
                return self._said(_ODD)
            case "empty":
                return self._said("x")[-1:]
            case "full length":
                *body, end = self._said(self._wrong())
                return [*itertools.islice(itertools.cycle(body or [end]), max(most - 1, 0)), end]
        if not tools:
            return self._said(answer)
        name = "no_such_tool" if turn == "unknown tool" else tools[0]["function"]["name"]
        called = self._said("", _call(name, tools[0]), tools)
        return [*called[: len(called) * 2 // 3], called[-1]] if turn == "broken call" else called

    def _wrong(self) -> str:
        self.texts.append(str(next(self._marks)))
        return self.texts[-1]

    def _said(self, text: str, call: Mapping[str, Any] | None = None, tools: Sequence[Tool] = ()) -> list[int]:
        message: Message = {"role": "assistant", "content": text}
        message |= {} if call is None else {"tool_calls": [call]}
        tokens, trained = self._tokenizer.conversation(Chat((_ASKED, message), 1, tuple(tools)))
        return np.asarray(tokens)[trained].tolist()


@dataclass(frozen=True)
class ScriptedGeneration:
    """`Generation` without engines: each episode brings its own requests."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Any]:
        """See `Generation.serving`."""
        yield None

    def finish_generation(self) -> dict[str, float]:
        """See `Generation.finish_generation`."""
        return {}


def _call(name: str, tool: Tool) -> dict[str, Any]:
    """Return a call with an example of each argument."""
    parameters = tool["function"].get("parameters") or {}
    arguments = {key: _example(schema) for key, schema in parameters.get("properties", {}).items()}
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}


def _example(schema: Mapping[str, Any]) -> Any:
    for given in ("default", "const"):
        if given in schema:
            return schema[given]
    if schema.get("enum"):
        return schema["enum"][0]
    kinds: Iterator[Any] = iter(schema.get("anyOf") or ())
    kind = schema.get("type") or next(kinds, {}).get("type", "string")
    return _EXAMPLES.get(kind[0] if isinstance(kind, list) else kind, "1")
