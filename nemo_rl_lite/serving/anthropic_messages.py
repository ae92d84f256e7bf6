"""Anthropic's Messages API."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.serving.exchange import Event, Exchange, ShownText
from nemo_rl_lite.serving.openai_completions import written_arguments
from nemo_rl_lite.serving.protocol import (
    FULL,
    HARMLESS,
    Answer,
    ChatRequest,
    RefusedError,
    Reply,
    StopString,
    WireRequest,
    joined,
    read_request,
)

# Claude Code begins its system prompt with a block for Anthropic's accounting, which has the version and a hash.
_BILLING = "x-anthropic-billing-header"
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    410: "invalid_request_error",
    503: "overloaded_error",
}


class _Body(WireRequest):
    """Parameters of a message."""

    harmless = HARMLESS | {"thinking", "context_management", "betas", "cache_control", "inference_geo", "speed"}

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(default=None, gt=0)
    stop_sequences: list[StopString] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = None


class MessagesExchange(Exchange[ChatRequest]):
    """`POST /v1/messages`."""

    def __init__(self, asked: ChatRequest, tokenizer: ChatTokenizer, model: str):
        super().__init__(asked, tokenizer, model)
        self._id, self._shown = f"msg_{uuid.uuid4().hex}", ShownText(asked, tokenizer)
        # Whether the first event and the text block's first event were sent.
        self._is_begun = self._has_text = False

    @classmethod
    def read(cls, content: Any, tokenizer: ChatTokenizer, model: str) -> "MessagesExchange":
        return cls(_chat_request(read_request(_Body, content)), tokenizer, model)

    @staticmethod
    def refusal(refused: RefusedError) -> dict[str, Any]:
        kind = _ERRORS.get(refused.status, "api_error")
        # Agents compact a conversation when they read these words.
        message = f"prompt is too long: {refused}" if refused.code == FULL else str(refused)
        return {"type": "error", "error": {"type": kind, "message": message}}

    def body(self, answer: Answer) -> dict[str, Any]:
        (reply,), (asked, said) = answer.replies, answer.usage
        text = [{"type": "text", "text": reply.text}] if reply.text else []
        calls = [{**_opened(call), "input": call["function"]["arguments"]} for call in reply.calls]
        ending = {"content": [*text, *calls], **_ending(answer)}
        return {**self._opening(), **ending, "usage": {"input_tokens": asked, "output_tokens": said}}

    def begun(self, index: int, so_far: Completion) -> Iterator[Event]:
        yield from self._begin()
        yield from self._text(self._shown.more(so_far))

    def ended(self, answer: Answer) -> Iterator[Event]:
        (reply,), (asked, said) = answer.replies, answer.usage
        yield from self._begin()
        yield from self._text(self._shown.rest(reply.text))
        if self._has_text:
            yield {"type": "content_block_stop", "index": 0}
        for index, call in enumerate(reply.calls, start=int(self._has_text)):
            delta = {"type": "input_json_delta", "partial_json": written_arguments(call)}
            yield {"type": "content_block_start", "index": index, "content_block": {**_opened(call), "input": {}}}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        usage = {"input_tokens": asked, "output_tokens": said}
        yield {"type": "message_delta", "delta": _ending(answer), "usage": usage}
        yield {"type": "message_stop"}

    def _begin(self) -> Iterator[Event]:
        """Yield the first event unless it was sent. It has no usage yet."""
        if not self._is_begun:
            self._is_begun = True
            yield {"type": "message_start", "message": self._opening()}

    def _text(self, text: str) -> Iterator[Event]:
        """Yield more text of the text block."""
        if text and not self._has_text:
            self._has_text = True
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        if text:
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}

    def _opening(self) -> dict[str, Any]:
        """Return the message of the first event of a stream."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }


def _ending(answer: Answer) -> dict[str, Any]:
    """Return why the response ended."""
    (reply,), (completion,) = answer.replies, answer.completions
    return {"stop_reason": _stop_reason(reply, completion), "stop_sequence": reply.stop}


def _stop_reason(reply: Reply, completion: Completion) -> str:
    if reply.calls:
        return "tool_use"
    if reply.stop is not None:
        return "stop_sequence"
    return "max_tokens" if completion.finish_reason == "length" else "end_turn"


def _opened(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content block of a call without its arguments."""
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _chat_request(given: _Body) -> ChatRequest:
    """Translate a request. Raises RefusedError: it has content that is not text, thinking, a call or its result."""
    system = [{"role": "system", "content": given.system}] if given.system else []
    said = (one for message in [*system, *given.messages] for one in _messages(message))
    choice = given.tool_choice or {}
    return read_request(
        ChatRequest,
        {
            "model": given.model,
            "messages": joined(said),
            "max_tokens": given.max_tokens,
            "stop": given.stop_sequences,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": given.top_k,
            "tools": None if given.tools is None else [_function(tool) for tool in given.tools],
            "tool_choice": choice.get("type"),
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
            "response_format": _response_format(given.output_config or {}),
            "stream": given.stream,
        },
    )


def _messages(message: Mapping[str, Any]) -> Iterator[Message]:
    """Yield the messages of one with content blocks: each result of a call becomes a message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RefusedError(400, f"messages: the role {role!r:.40} is unknown: use user or assistant", "messages")
    if not isinstance(content, list):
        content = [{"type": "text", "text": content}]
    if not content:
        yield {"role": role, "content": ""}
    for block in content:
        match block, role:
            case {"type": "text", "text": str(text)}, _:
                if role != "system" or not text.startswith(_BILLING):
                    yield {"role": role, "content": text}
            case {"type": "tool_result", "tool_use_id": str(call)}, "user":
                yield {"role": "tool", "tool_call_id": call, "content": _result(block.get("content") or "")}
            case {"type": "tool_use", "id": str(call), "name": str(name)}, "assistant":
                function = {"name": name, "arguments": block.get("input") or {}}
                calls = [{"id": call, "type": "function", "function": function}]
                yield {"role": role, "content": "", "tool_calls": calls}
            case {"type": "thinking", "thinking": str(thoughts)}, "assistant":
                yield {"role": role, "content": "", "reasoning_content": thoughts}
            case {"type": "redacted_thinking"}, "assistant":
                pass
            case _:
                raise _unread(block, f"a message of the {role}")


def _result(content: Any) -> str:
    """Return the text of a tool's result. Raises RefusedError: it has other content."""
    if isinstance(content, str):
        return content
    found = list[str]()
    for block in content if isinstance(content, list) else [content]:
        match block:
            case {"type": "text", "text": str(text)}:
                found.append(text)
            case _:
                raise _unread(block, "a tool result")
    return "\n\n".join(found)


def _unread(block: Any, where: str) -> RefusedError:
    what = f"content of type {block.get('type')!r:.40}" if isinstance(block, Mapping) else f"content {block!r:.40}"
    return RefusedError(400, f"messages: {what} in {where} is not supported: send text", "messages")


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        rule = f"{tool.get('type') or tool.get('name')!r:.60} is not supported: offer tools with an input_schema"
        raise RefusedError(400, f"tools: {rule}", "tools")
    own = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": own}


def _response_format(output_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Translate the format of structured output. Other settings, such as the effort, have no effect."""
    form = output_config.get("format")
    return {"type": "json_schema", "json_schema": form} if form else None
