"""OpenAI's Responses API. No response is stored: each request has the whole conversation."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.serving.exchange import Event, Exchange, ShownText
from nemo_rl_lite.serving.openai_completions import openai_refusal, written_arguments
from nemo_rl_lite.serving.protocol import (
    HARMLESS,
    Answer,
    ChatRequest,
    RefusedError,
    WireRequest,
    joined,
    read_request,
)

_TEXTS = ("input_text", "output_text", "text")
_THOUGHTS = ("reasoning_text", "summary_text")


class _TextOptions(WireRequest):
    """The form of a response's text."""

    format: dict[str, Any] | None = None


class _Body(WireRequest):
    """Parameters of a response."""

    harmless = HARMLESS | {
        "reasoning",
        "include",
        "truncation",
        "client_metadata",
        "prompt_cache_retention",
        "prompt_cache_options",
        "max_tool_calls",
        "stream_options",
    }

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, gt=0)
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _TextOptions | None = None
    stream: bool | None = None


class _Chat(ChatRequest):
    """The internal form, whose errors name the parameter of this API."""

    source = "input"


class ResponsesExchange(Exchange[ChatRequest]):
    """`POST /v1/responses`."""

    def __init__(self, asked: ChatRequest, given: _Body, tokenizer: ChatTokenizer, model: str):
        super().__init__(asked, tokenizer, model)
        self._given, self._shown, self._sequence = given, ShownText(asked, tokenizer), 0
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        # Whether the first events and the message's first events were sent.
        self._is_begun = self._has_text = False

    @classmethod
    def read(cls, content: Any, tokenizer: ChatTokenizer, model: str) -> "ResponsesExchange":
        given = read_request(_Body, content)
        return cls(_chat_request(given), given, tokenizer, model)

    @staticmethod
    def refusal(refused: RefusedError) -> dict[str, Any]:
        return openai_refusal(refused)

    def failed(self, refused: RefusedError) -> Event:
        error = {"code": refused.code or "server_error", "message": str(refused)}
        return self._event("response.failed", response={**self._response("failed"), "error": error})

    def body(self, answer: Answer) -> dict[str, Any]:
        (reply,), (completion,), (asked, said) = answer.replies, answer.completions, answer.usage
        is_cut = completion.finish_reason == "length" and not reply.calls
        status = "incomplete" if is_cut else "completed"
        calls = [_call_item(call) for call in reply.calls]
        message = [] if calls and not reply.text else [self._message(reply.text, status)]
        return {
            **self._response(status),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [*message, *calls],
            "usage": {
                "input_tokens": asked,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": said,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": asked + said,
            },
        }

    def begun(self, index: int, so_far: Completion) -> Iterator[Event]:
        yield from self._begin()
        yield from self._text(self._shown.more(so_far))

    def ended(self, answer: Answer) -> Iterator[Event]:
        body = self.body(answer)
        yield from self._begin()
        for index, item in enumerate(body["output"]):
            yield from self._message_end(item) if item["type"] == "message" else self._call(index, item)
        yield self._event(f"response.{body['status']}", response=body)

    def _begin(self) -> Iterator[Event]:
        """Yield the first events unless they were sent."""
        if not self._is_begun:
            self._is_begun = True
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=self._response("in_progress"))

    def _text(self, text: str) -> Iterator[Event]:
        """Yield more text of the message."""
        if text and not self._has_text:
            yield from self._message_start()
        if text:
            yield self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def _message_start(self) -> Iterator[Event]:
        self._has_text = True
        item = {**self._message("", "in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part_event("response.content_part.added", part=_part(""))

    def _message_end(self, item: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the rest of the message's text, and its last events."""
        (part,) = item["content"]
        if not self._has_text:
            yield from self._message_start()
        yield from self._text(self._shown.rest(part["text"]))
        yield self._part_event("response.output_text.done", text=part["text"], logprobs=[])
        yield self._part_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _call(self, index: int, item: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a call, whose arguments are complete."""
        place = {"item_id": item["id"], "output_index": index}
        opened = {**item, "arguments": "", "status": "in_progress"}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield self._event("response.output_item.added", output_index=index, item=opened)
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event("response.function_call_arguments.done", **place, **done)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _part_event(self, kind: str, **content: Any) -> Event:
        """Return an event of the message's text."""
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **content)

    def _event(self, kind: str, /, **content: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **content}

    def _message(self, text: str, status: str) -> dict[str, Any]:
        own = {"id": self._message_id, "type": "message", "role": "assistant", "status": status}
        return {**own, "content": [_part(text)]}

    def _response(self, status: str) -> dict[str, Any]:
        """Return a response without output."""
        given = self._given
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": given.temperature,
            "tool_choice": given.tool_choice or "auto",
            "tools": given.tools or [],
            "top_p": given.top_p,
            "usage": None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the output item of a call."""
    own = {"id": f"fc_{call['id']}", "call_id": call["id"], "name": call["function"]["name"]}
    return {"type": "function_call", **own, "arguments": written_arguments(call), "status": "completed"}


def _chat_request(given: _Body) -> ChatRequest:
    """Translate a request. Raises RefusedError: an item of its input is not a message, reasoning, a call or an
    output."""
    items = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
    system = [{"role": "system", "content": given.instructions}] if given.instructions else []
    # Codex also offers tools that OpenAI's servers run. The model does not see them.
    functions = [tool for tool in given.tools or () if tool.get("type", "function") == "function"]
    return read_request(
        _Chat,
        {
            "model": given.model,
            "messages": joined([*system, *map(_message, items)]),
            "max_tokens": given.max_output_tokens,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "tools": functions or None,
            "tool_choice": given.tool_choice,
            "parallel_tool_calls": given.parallel_tool_calls,
            "response_format": _response_format(given.text),
            "stream": given.stream,
        },
    )


def _message(item: Mapping[str, Any]) -> Message:
    """Return the message of an item. A call or reasoning is one of the assistant, which `joined` adds to its turn."""
    match item:
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            return {"role": "system" if role == "developer" else role, "content": _text(content)}
        case {"type": "function_call", "call_id": str(call), "name": str(name), "arguments": str(arguments)}:
            function = {"name": name, "arguments": arguments}
            calls = [{"id": call, "type": "function", "function": function}]
            return {"role": "assistant", "content": "", "tool_calls": calls}
        case {"type": "function_call_output", "call_id": str(call), "output": output}:
            return {"role": "tool", "tool_call_id": call, "content": _text(output)}
        case {"type": "reasoning"}:
            thoughts = [_text(item.get(name) or [], _THOUGHTS) for name in ("content", "summary")]
            thought = "\n\n".join(filter(None, thoughts))
            return {"role": "assistant", "content": "", **({"reasoning_content": thought} if thought else {})}
    what = f"an item of type {item.get('type')!r:.40}"
    raise RefusedError(400, f"input: {what} is not supported: send messages, calls and their outputs", "input")


def _text(content: Any, kinds: Sequence[str] = _TEXTS) -> str:
    """Return the text of content that has only texts of these types. Raises RefusedError: it has others."""
    if isinstance(content, str):
        return content
    found = list[str]()
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": kind, "text": str(text)} if kind in kinds:
                found.append(text)
            case _:
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise RefusedError(400, f"input: content of type {kind!r:.40} is not supported: send text", "input")
    return "\n\n".join(found)


def _response_format(text: _TextOptions | None) -> dict[str, Any]:
    """Translate the format of structured output. Other settings, such as the verbosity, have no effect."""
    form = (text.format if text else None) or {"type": "text"}
    return {"type": form["type"], "json_schema": form} if form.get("type") == "json_schema" else form
