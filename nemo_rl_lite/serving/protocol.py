"""Requests and answers of the OpenAI API, independent of HTTP and engines."""

import asyncio
import json
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from nemo_rl_lite.data.messages import Message, read_messages
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.data.tools import Tool, callable_tools, checked_calls
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Completion, ServedOptions

# Parameters that do not change sampling.
_HARMLESS = frozenset(
    {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"return_token_ids", "parallel_tool_calls", "include_reasoning"}
)
# Alternatives to refused parameters.
_INSTEAD = {
    "tools": "use /chat/completions, whose chat template writes them",
    "functions": "use tools",
    "stop_token_ids": "set generation.stop_token_ids, for all responses",
    "echo": "prepend the prompt to the text yourself; the engines return no logprobs of a prompt",
}
# Values that do not change sampling.
_NEUTRAL: dict[str, Any] = {
    "tool_choice": "none",
    "best_of": 1,
    "min_p": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
# OpenAI's code for a chat without room for a response.
FULL = "context_length_exceeded"
# Longer texts, in characters, are tokenized in a thread: they would block the event loop for milliseconds.
_LONG = 20_000
# OpenAI's and vLLM's limit on the most likely tokens of a position.
_MOST_LOGPROBS = 20
# Length of a tool call's id, which Mistral's templates require.
_ID_LETTERS = 9


class RefusedError(Exception):
    """A rejected request: HTTP status, message, parameter and OpenAI's error code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Answer:
    """Prompts and their responses, the same number for each prompt, in order."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[Completion, ...]


class ApiRequest(BaseModel):
    """Parameters of all requests; None if not given."""

    model_config = ConfigDict(extra="allow")
    source: ClassVar[str]
    """Name of the prompt's parameter."""
    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = Field(default=None, gt=0, le=128)
    max_tokens: int | None = Field(default=None, gt=0)
    stop: list[Annotated[str, StringConstraints(min_length=1)]] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    @abstractmethod
    def most_likely(self) -> int:
        """The number of most likely tokens that each position reports."""

    def options(self) -> ServedOptions:
        """Return penalties, top logprobs and the schema. Raises RefusedError: the response format is invalid."""
        return ServedOptions(
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            top_logprobs=self.most_likely,
            json_schema=_json_schema(self.response_format),
        )

    @abstractmethod
    def characters(self) -> int:
        """Count the characters of the longest prompt."""

    @abstractmethod
    def prompts(self, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each prompt. Raises RefusedError: a prompt is empty or invalid."""

    def text(self, completion: Completion, tokenizer: ChatTokenizer) -> str:
        """Return the text of a response up to the request's stop string. Ids and logprobs keep all tokens."""
        text = tokenizer.text(completion.tokens)
        return text[: min((text.index(stop) for stop in self.stop or () if stop in text), default=None)]

    @abstractmethod
    def body(self, answer: Answer, tokenizer: ChatTokenizer, model: str) -> dict[str, Any]:
        """Convert the answer to OpenAI's format, plus vLLM's token ids."""

    @abstractmethod
    def logprobs_of(self, completion: Completion, tokenizer: ChatTokenizer) -> dict[str, Any] | None:
        """Return the logprobs of a choice; None if not requested."""

    def shown(self, text: str, so_far: Completion, tokenizer: ChatTokenizer) -> int:
        """Return the number of characters of an unfinished response that a stream may show."""
        return held_back(text, self.stop or ())

    def opening_delta(self) -> Mapping[str, Any]:
        """Return the content of a choice's first chunk, before its text."""
        return {}

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]:
        """Return the content of a chunk with more text."""

    @abstractmethod
    def last_delta(self, choice: Mapping[str, Any], sent: int) -> Mapping[str, Any]:
        """Return the content of the last chunk of a choice, after `sent` characters of its text."""


ChoiceProgress = Callable[[int, Completion], None]
"""Receives the index of a choice and its tokens so far."""


class CompletionHandler(Protocol):
    """Answers the requests of one key."""

    async def respond(self, asked: ApiRequest, progress: ChoiceProgress | None = None) -> Answer:
        """Answer one request; report the tokens so far if it streams. Raises RefusedError."""
        ...


def read_request[T: ApiRequest](kind: type[T], content: Any) -> T:
    """Parse the body of a request. Raises RefusedError: it is invalid or has an unsupported parameter."""
    try:
        asked = kind.model_validate(content)
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


def _answer_body(answer: Answer, choices: Sequence[Mapping[str, Any]], model: str) -> dict[str, Any]:
    """Return an answer; `choices` has the request-specific fields. `system_fingerprint` is the newest step whose
    weights sampled the responses."""
    responses = answer.completions
    sizes = sum(map(len, answer.prompts)), sum(len(one.tokens) for one in responses)
    return {
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"step-{max(one.versions[-1][0] for one in responses)}",
        "choices": [
            {"index": index, "finish_reason": one.finish_reason, "token_ids": one.tokens.tolist(), **choice}
            for index, (choice, one) in enumerate(zip(choices, responses, strict=True))
        ],
        "usage": {"prompt_tokens": sizes[0], "completion_tokens": sizes[1], "total_tokens": sum(sizes)},
    }


class ChatRequest(ApiRequest):
    """Parameters of a chat completion."""

    source, id_prefix, chunk_object = "messages", "chatcmpl", "chat.completion.chunk"

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(default=None, gt=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_likely(self) -> int:
        return self.top_logprobs or 0

    def chat(self) -> tuple[Message, ...]:
        """Read the messages. Raises RefusedError: they are not a chat that ends before the assistant's turn."""
        try:
            messages = read_messages(self.messages, "messages")
        except DataError as error:
            raise RefusedError(400, str(error), "messages") from None
        if messages[-1]["role"] == "assistant":
            raise RefusedError(400, "messages: the last message is the assistant's; end with another role", "messages")
        return messages

    def offered(self) -> tuple[Tool, ...]:
        """Return the tools that the model may call. Raises RefusedError: a tool is invalid, or a call is forced."""
        if self.tool_choice not in (None, "auto", "none"):
            fix = 'use "auto" or "none"; the engines cannot force a call'
            rule = f"tool_choice = {self.tool_choice!r:.60} is not supported here: {fix}"
            raise RefusedError(400, rule, "tool_choice")
        try:
            tools = callable_tools(self.tools or (), "tools")
        except DataError as error:
            raise RefusedError(400, str(error), "tools") from None
        return () if self.tool_choice == "none" else tools

    def characters(self) -> int:
        return sum(_characters(message.get("content")) for message in self.messages)

    def prompts(self, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
        tools = self.offered()
        if tools and not tokenizer.takes_tools:
            rule = (
                "the model's chat template does not write tools, or has an unknown call format (docs/environments.md)"
            )
            fix = "describe the tools in a message, or set policy.tokenizer.chat_template"
            raise RefusedError(400, f"tools: {rule}: {fix}", "tools")
        try:
            return (tuple(tokenizer.prompt(self.chat(), tools)),)
        except DataError as error:
            raise RefusedError(400, str(error), "messages") from None

    def body(self, answer: Answer, tokenizer: ChatTokenizer, model: str) -> dict[str, Any]:
        tools = self.offered()
        choices = [
            {**self._said(one, tokenizer, tools), "logprobs": self.logprobs_of(one, tokenizer)}
            for one in answer.completions
        ]
        (prompt,) = answer.prompts
        own = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "prompt_token_ids": list(prompt)}
        return _answer_body(answer, choices, model) | own

    def shown(self, text: str, so_far: Completion, tokenizer: ChatTokenizer) -> int:
        """Hold back text that may start a tool call until the response ends."""
        if not self.offered():
            return super().shown(text, so_far, tokenizer)
        marker = tokenizer.call_marker
        if tokenizer.written_calls(so_far.tokens)[1] or (not marker and text.lstrip()[:1] in ("", "{")):
            return 0
        return held_back(text, [*(self.stop or ()), *marker.split()[:1]])

    def opening_delta(self) -> Mapping[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def last_delta(self, choice: Mapping[str, Any], sent: int) -> Mapping[str, Any]:
        message = choice["message"]
        rest = (message["content"] or "")[sent:]
        delta: dict[str, Any] = {"content": rest} if rest else {}
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        return {"delta": delta}

    def _said(self, completion: Completion, tokenizer: ChatTokenizer, tools: Sequence[Tool]) -> dict[str, Any]:
        """Return the message of a response with its tool calls. As in vLLM, an unreadable call makes the response a
        text, and the client checks calls against the tools."""
        before, written = tokenizer.written_calls(completion.tokens) if tools else ("", [])
        if not written or any(call.trouble for call in written):
            return {"message": {"role": "assistant", "content": self.text(completion, tokenizer)}}
        called: list[dict[str, Any]] = []
        calls = checked_calls(written, tools, turn=0)[: 1 if self.parallel_tool_calls is False else None]
        for call in calls:
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            function = {"name": call["function"]["name"], "arguments": arguments}
            called.append({"id": uuid.uuid4().hex[:_ID_LETTERS], "type": "function", "function": function})
        message = {"role": "assistant", "content": before.rstrip() or None, "tool_calls": called}
        return {"message": message, "finish_reason": "tool_calls"}

    def logprobs_of(self, completion: Completion, tokenizer: ChatTokenizer) -> dict[str, Any] | None:
        if not self.logprobs and not self.top_logprobs:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            piece = tokenizer.piece(token)
            return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}

        sampled = _sampled(completion)
        tops = _top_logprobs(completion, self.most_likely)
        content = [
            {**entry(*one), "top_logprobs": [entry(*pair) for pair in top]}
            for one, top in zip(sampled, tops, strict=True)
        ]
        return {"content": content}


class CompletionRequest(ApiRequest):
    """Parameters of a completion."""

    source, id_prefix, chunk_object = "prompt", "cmpl", "text_completion"

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_LOGPROBS)

    @property
    def most_likely(self) -> int:
        return self.logprobs or 0

    def characters(self) -> int:
        prompts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        return max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0)

    def prompts(self, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
        several = isinstance(self.prompt, list) and self.prompt and not _is_token(self.prompt[0])
        return tuple(_tokens(prompt, tokenizer) for prompt in (self.prompt if several else [self.prompt]))

    def body(self, answer: Answer, tokenizer: ChatTokenizer, model: str) -> dict[str, Any]:
        each = len(answer.completions) // len(answer.prompts)
        choices = [
            {
                "text": self.text(completion, tokenizer),
                "logprobs": self.logprobs_of(completion, tokenizer),
                "prompt_token_ids": list(answer.prompts[index // each]),
            }
            for index, completion in enumerate(answer.completions)
        ]
        return _answer_body(answer, choices, model) | {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def last_delta(self, choice: Mapping[str, Any], sent: int) -> Mapping[str, Any]:
        return {"text": choice["text"][sent:], "prompt_token_ids": choice["prompt_token_ids"]}

    def logprobs_of(self, completion: Completion, tokenizer: ChatTokenizer) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        sampled = [(tokenizer.piece(token), logprob) for token, logprob in _sampled(completion)]
        pieces = [piece for piece, _ in sampled]
        # As in OpenAI's API, the sampled token is there too, also if it is less likely.
        tops = [
            {tokenizer.piece(token): logprob for token, logprob in top} | {piece: logprob}
            for top, (piece, logprob) in zip(_top_logprobs(completion, self.most_likely), sampled, strict=True)
        ]
        return {
            "tokens": pieces,
            "token_logprobs": completion.logprobs.tolist(),
            "top_logprobs": tops if self.logprobs else None,
            "text_offset": list(accumulate(map(len, pieces[:-1]), initial=0)),
        }


async def tokenized[T](asked: ApiRequest, work: Callable[[], T], tokenizer: ChatTokenizer, max_length: int) -> T:
    """Return `work()`, which tokenizes a request; in a thread if its text is long.

    Raises:
        RefusedError: the text has too many characters for `max_length` tokens.
    """
    characters = asked.characters()
    if characters > max_length * tokenizer.longest_token:
        rule = (
            f"{asked.source}: {characters:,} characters exceed policy.max_total_sequence_length = {max_length} tokens"
        )
        raise RefusedError(400, f"{rule}: end the conversation, or send less", asked.source, FULL)
    return await asyncio.to_thread(work) if characters > _LONG else work()


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return the number of characters before the first mark, or before an end that may become a mark."""
    shown = min((text.index(mark) for mark in marks if mark in text), default=len(text))
    longest = max(map(len, marks), default=0)
    for length in range(min(longest - 1, shown), 0, -1):
        if any(mark.startswith(text[shown - length : shown]) for mark in marks):
            return shown - length
    return shown


def _json_schema(response_format: Mapping[str, Any] | None) -> str | None:
    """Return the schema of a `response_format` as JSON text; None for free text. Raises RefusedError: it is invalid."""
    given = response_format or {}
    match given.get("type", "text"), given.get("json_schema"):
        case "text", _:
            return None
        case "json_object", _:
            return '{"type": "object"}'
        case "json_schema", {"schema": dict(schema)}:
            return json.dumps(schema)
    known = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
    raise RefusedError(400, f"response_format = {given!r:.60}: it must be {known}", "response_format")


def _top_logprobs(completion: Completion, count: int) -> Sequence[Sequence[tuple[int, float]]]:
    """Return the `count` most likely tokens of each position. An engine that reports none was greedy, so that the
    sampled token is the most likely one."""
    if completion.top_logprobs or not count:
        return completion.top_logprobs or [()] * len(completion.tokens)
    return [[pair] for pair in _sampled(completion)]


def _sampled(completion: Completion) -> list[tuple[int, float]]:
    """Return each sampled token with its logprob."""
    return list(zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True))


def _characters(content: Any) -> int:
    if isinstance(content, list):
        return sum(_characters(part.get("text")) for part in content if isinstance(part, dict))
    return len(content) if isinstance(content, str) else 0


def _is_token(given: Any) -> bool:
    return type(given) is int


def _tokens(prompt: Any, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Return the tokens of one prompt. Raises RefusedError: it is invalid or empty."""
    if isinstance(prompt, str):
        tokens = tokenizer.opening(prompt)
    elif isinstance(prompt, list) and all(map(_is_token, prompt)):
        tokens = prompt
    else:
        raise RefusedError(400, "prompt: must be a text, a list of token ids, or a list of these", "prompt")
    if not tokens:
        raise RefusedError(400, "prompt: has no tokens", "prompt")
    highest = tokenizer.highest_token
    if unknown := [token for token in tokens if not 0 <= token <= highest]:
        raise RefusedError(400, f"prompt: {unknown[0]} is not a token id (0 to {highest})", "prompt")
    return tuple(tokens)
