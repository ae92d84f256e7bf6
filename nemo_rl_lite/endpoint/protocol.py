"""OpenAI's chat completions: what a request may ask for, and what it gets. It knows neither HTTP nor engines."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_rl_lite.data.messages import Message, read_messages
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Completion

# These change nothing that the policy samples.
_HARMLESS = frozenset(
    {"user", "store", "metadata", "stream_options", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"return_token_ids", "parallel_tool_calls", "include_reasoning"}
)
# What to do in place of a parameter that is refused.
_INSTEAD = {
    "tools": "describe the tools in a message, or let environment.name answer the calls",
    "functions": "describe the tools in a message, or let environment.name answer the calls",
    "tool_choice": "describe the tools in a message, or let environment.name answer the calls",
    "stop": "set generation.stop_strings, which holds for all responses",
    "stop_token_ids": "set generation.stop_token_ids, which holds for all responses",
    "response_format": "describe the format in a message, and reward it",
    "top_logprobs": "the engines keep the logprob of the sampled token alone",
}
# Values with which these parameters change nothing.
_NEUTRAL: dict[str, Any] = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0}
_NEUTRAL |= {"top_logprobs": 0, "tool_choice": "none", "response_format": {"type": "text"}}


class RefusedError(Exception):
    """A request is not answered: an HTTP status, what is wrong with which parameter, and a word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients expect it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ChatRequest(BaseModel):
    """The parameters that are understood. None: not given."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]]
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = Field(default=None, gt=0)
    max_completion_tokens: int | None = Field(default=None, gt=0)
    logprobs: bool | None = None
    stream: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        """How long the response may be, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def chat(self) -> tuple[Message, ...]:
        """The messages. Raises RefusedError: they are no chat that the policy can answer."""
        try:
            messages = read_messages(self.messages, "messages")
        except DataError as error:
            raise RefusedError(400, str(error), "messages") from None
        if messages[-1]["role"] == "assistant":
            raise RefusedError(400, "messages: the last one is the assistant's, which has to answer it", "messages")
        return messages


@dataclass(frozen=True)
class Answer:
    """A response, and the tokens that it continues."""

    prompt: tuple[int, ...]
    completion: Completion


class Respondent(Protocol):
    """Answers the requests that come with one key."""

    async def respond(self, asked: ChatRequest) -> Answer:
        """Answer a request. Raises RefusedError: it cannot be answered."""
        ...


def read_request(content: Any) -> ChatRequest:
    """Read the body of a request. Raises RefusedError: it is none, or asks for what is not done here."""
    try:
        asked = ChatRequest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise RefusedError(400, f"{where}: {first['msg']}", where) from None
    for name, value in (asked.model_extra or {}).items():
        changes = value not in (None, [], {}, "", False) and value != _NEUTRAL.get(name)
        if name not in _HARMLESS and changes:
            instead = _INSTEAD.get(name, "leave it out")
            raise RefusedError(400, f"{name} = {value!r:.60} is not supported here: {instead}", name)
    return asked


def completion_body(asked: ChatRequest, answer: Answer, tokenizer: ChatTokenizer, model: str) -> dict[str, Any]:
    """The answer in OpenAI's format, with vLLM's fields for token ids. `system_fingerprint` names the step that made
    the weights."""
    completion = answer.completion
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": tokenizer.text(completion.tokens)},
        "logprobs": {"content": _logprobs(completion, tokenizer)} if asked.logprobs else None,
        "finish_reason": completion.finish_reason,
        "token_ids": list(completion.tokens),
    }
    sizes = len(answer.prompt), len(completion.tokens)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"step-{completion.versions[-1]}",
        "choices": [choice],
        "usage": {"prompt_tokens": sizes[0], "completion_tokens": sizes[1], "total_tokens": sum(sizes)},
        "prompt_token_ids": list(answer.prompt),
    }


def as_chunk(body: Mapping[str, Any]) -> dict[str, Any]:
    """The whole answer as the one chunk of a stream."""
    choices = [
        {name: value for name, value in choice.items() if name != "message"} | {"delta": choice["message"]}
        for choice in body["choices"]
    ]
    return {**body, "object": "chat.completion.chunk", "choices": choices}


def _logprobs(completion: Completion, tokenizer: ChatTokenizer) -> list[dict[str, Any]]:
    pieces = [tokenizer.piece(token) for token in completion.tokens]
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(pieces, completion.logprobs, strict=True)
    ]
