"""Requests and answers of OpenAI's completions and chat completions, without HTTP and without engines."""

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
from nemo_rl_lite.generation.interface import Completion

# Parameters that do not change sampling.
_HARMLESS = frozenset(
    {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"return_token_ids", "parallel_tool_calls", "include_reasoning"}
)
# Alternatives to refused parameters.
_INSTEAD = {
    "tools": "the chat template writes them, so ask /chat/completions",
    "functions": "name them in tools, as OpenAI's newer API does",
    "stop_token_ids": "those of generation.stop_token_ids hold for all responses",
    "response_format": "describe the format in a message",
    "top_logprobs": "the engines keep the logprob of the sampled token alone",
    "echo": "the engines keep no logprobs of a prompt; write the prompt before the text yourself",
}
# Values that leave sampling as it is.
_NEUTRAL: dict[str, Any] = {
    "top_logprobs": 0,
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
# OpenAI's word for a chat that leaves no room for a response.
FULL = "context_length_exceeded"
# Characters of a text that the event loop tokenizes in a few milliseconds.
_LONG = 20_000
# The length of a call's id; Mistral's templates take no other.
_ID_LETTERS = 9


class RefusedError(Exception):
    """A request that is not answered: HTTP status, message, parameter, and a word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients expect it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Answer:
    """Prompts, and their responses in turn: equally many for each, and at least one."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[Completion, ...]


class ApiRequest(BaseModel):
    """Parameters of all requests. None: not given."""

    model_config = ConfigDict(extra="allow")
    source: ClassVar[str]
    """The parameter of the prompt."""
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
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @abstractmethod
    def characters(self) -> int:
        """Count the characters of the longest prompt."""

    @abstractmethod
    def prompts(self, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
        """Tokens of each prompt. Raises RefusedError: there are none, or no engine takes them."""

    def text(self, completion: Completion, tokenizer: ChatTokenizer) -> str:
        """Text of a response, up to the request's own stop string; ids and logprobs are of all tokens."""
        text = tokenizer.text(completion.tokens)
        return text[: min((text.index(stop) for stop in self.stop or () if stop in text), default=None)]

    @abstractmethod
    def body(self, answer: Answer, tokenizer: ChatTokenizer, model: str) -> dict[str, Any]:
        """Convert the answer to OpenAI's format, with vLLM's fields for token ids."""

    @abstractmethod
    def logprobs_of(self, completion: Completion, tokenizer: ChatTokenizer) -> dict[str, Any] | None:
        """Return the logprobs of a choice; None where the request asks for none."""

    def shown(self, text: str, so_far: Completion, tokenizer: ChatTokenizer) -> int:
        """Return how many characters of an unfinished response a stream may show."""
        return held_back(text, self.stop or ())

    def opening_delta(self) -> Mapping[str, Any]:
        """Return what the first chunk of a choice says before its text."""
        return {}

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]:
        """Return a choice's part of a chunk with more text."""

    @abstractmethod
    def last_delta(self, choice: Mapping[str, Any], sent: int) -> Mapping[str, Any]:
        """Return a whole choice's part of the last chunk, behind so many characters of its text."""


ChoiceProgress = Callable[[int, Completion], None]
"""Told of a choice's tokens so far."""


class CompletionHandler(Protocol):
    """Answers the requests of one key."""

    async def respond(self, asked: ApiRequest, progress: ChoiceProgress | None = None) -> Answer:
        """Answer a request, and tell of the tokens so far where it streams. Raises RefusedError."""
        ...


def read_request[T: ApiRequest](kind: type[T], content: Any) -> T:
    """Read the body of a request. Raises RefusedError: it is invalid, or has an unsupported parameter."""
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
    """Fields of all answers; `choices` has the others, one entry for each response. `system_fingerprint` names the
    newest step whose weights sampled the responses."""
    responses = answer.completions
    sizes = sum(map(len, answer.prompts)), sum(len(one.tokens) for one in responses)
    return {
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"step-{max(one.versions[-1] for one in responses)}",
        "choices": [
            {"index": index, "finish_reason": one.finish_reason, "token_ids": list(one.tokens), **choice}
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
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def chat(self) -> tuple[Message, ...]:
        """Read the messages. Raises RefusedError: they are not a chat that the policy can answer."""
        try:
            messages = read_messages(self.messages, "messages")
        except DataError as error:
            raise RefusedError(400, str(error), "messages") from None
        if messages[-1]["role"] == "assistant":
            raise RefusedError(400, "messages: the last one is the assistant's, which has to answer it", "messages")
        return messages

    def offered(self) -> tuple[Tool, ...]:
        """Tools that the model may call. Raises RefusedError: they are not functions, or a call is demanded."""
        if self.tool_choice not in (None, "auto", "none"):
            fix = 'nothing makes the engines write a call; leave it out, or choose "auto" or "none"'
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
        """See `ApiRequest.prompts`: there is one. Raises RefusedError also if the tokenizer does not take the tools."""
        tools = self.offered()
        if tools and not tokenizer.takes_tools:
            rule = (
                "the model's chat template does not write them, or writes calls in a way that is not known "
                "(docs/environments.md lists the known ones)"
            )
            fix = "describe the tools in a message, or name another template with policy.tokenizer.chat_template"
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
        """See `ApiRequest.shown`. From where a call of a tool may begin, the text waits for the response's end."""
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
        """Message of a response, with its calls of `tools`, and the finish reason if there are any. As in vLLM, an
        unreadable call makes the response a text, and the client checks whether calls fit the tools."""
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
        if not self.logprobs:
            return None
        pieces = [tokenizer.piece(token) for token in completion.tokens]
        content = [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in zip(pieces, completion.logprobs, strict=True)
        ]
        return {"content": content}


class CompletionRequest(ApiRequest):
    """Parameters of a completion."""

    source, id_prefix, chunk_object = "prompt", "cmpl", "text_completion"

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0)

    def characters(self) -> int:
        prompts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        return max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0)

    def prompts(self, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
        """See `ApiRequest.prompts`. Raises RefusedError also for more `logprobs` than the engines keep."""
        if self.logprobs and (self.logprobs > 1 or self.temperature != 0):
            rule = "the engines keep the logprob of the sampled token alone, which is the likeliest at temperature 0"
            fix = "ask for logprobs = 0, or for 1 with temperature = 0"
            raise RefusedError(400, f"logprobs = {self.logprobs}: {rule}; {fix}", "logprobs")
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
        pieces = [tokenizer.piece(token) for token in completion.tokens]
        pairs = zip(pieces, completion.logprobs, strict=True)
        return {
            "tokens": pieces,
            "token_logprobs": list(completion.logprobs),
            "top_logprobs": [{piece: logprob} for piece, logprob in pairs] if self.logprobs else None,
            "text_offset": list(accumulate(map(len, pieces[:-1]), initial=0)),
        }


async def tokenized[T](asked: ApiRequest, work: Callable[[], T], tokenizer: ChatTokenizer, max_length: int) -> T:
    """Return `work()`, which tokenizes a request; beside the event loop where its text is long.

    Raises:
        RefusedError: the text exceeds `max_length` tokens, however it is tokenized.
    """
    characters = asked.characters()
    if characters > max_length * tokenizer.longest_token:
        rule = (
            f"{asked.source}: {characters:,} characters exceed policy.max_total_sequence_length = {max_length} tokens"
        )
        raise RefusedError(400, f"{rule}: end the conversation, or send less", asked.source, FULL)
    return await asyncio.to_thread(work) if characters > _LONG else work()


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return how many characters of a text can be shown: none of a mark in it, nor of what may become one at its
    end."""
    shown = min((text.index(mark) for mark in marks if mark in text), default=len(text))
    longest = max(map(len, marks), default=0)
    for length in range(min(longest - 1, shown), 0, -1):
        if any(mark.startswith(text[shown - length : shown]) for mark in marks):
            return shown - length
    return shown


def _characters(content: Any) -> int:
    """Count the characters of a message's content: a text, or a list of parts with texts."""
    if isinstance(content, list):
        return sum(_characters(part.get("text")) for part in content if isinstance(part, dict))
    return len(content) if isinstance(content, str) else 0


def _is_token(given: Any) -> bool:
    return type(given) is int


def _tokens(prompt: Any, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Tokens of one prompt. Raises RefusedError: it is invalid or empty."""
    if isinstance(prompt, str):
        tokens = tokenizer.opening(prompt)
    elif isinstance(prompt, list) and all(map(_is_token, prompt)):
        tokens = prompt
    else:
        raise RefusedError(400, "prompt: it is a text, a list of token ids, or a list of either", "prompt")
    if not tokens:
        raise RefusedError(400, "prompt: it has no tokens, and a response has to continue some", "prompt")
    highest = tokenizer.highest_token
    if unknown := [token for token in tokens if not 0 <= token <= highest]:
        raise RefusedError(400, f"prompt: {unknown[0]} is no token id, which are 0 to {highest}", "prompt")
    return tuple(tokens)
