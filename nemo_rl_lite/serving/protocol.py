"""Requests and answers, independent of HTTP, engines and APIs.

The internal form has the fields of OpenAI's chat and text completions. Other APIs translate theirs to it.
"""

import asyncio
import json
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from nemo_rl_lite.data.messages import Message, read_messages
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.data.tools import Tool, callable_tools, checked_calls
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Completion, ServedOptions

StopString = Annotated[str, StringConstraints(min_length=1)]
# Parameters of all APIs that do not change sampling.
HARMLESS = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})
# Alternatives to refused parameters.
_INSTEAD = {
    "tools": "use /chat/completions, whose chat template writes them",
    "functions": "use tools",
    "stop_token_ids": "set generation.stop_token_ids, for all responses",
    "previous_response_id": "no response is stored; send the whole conversation as input",
    "conversation": "no conversation is stored; send the whole conversation as input",
    "background": "wait for the response, or stream it",
    "echo": "prepend the prompt to the text yourself; the engines return no logprobs of a prompt",
}
# Values that do not change sampling.
_NEUTRAL: dict[str, Any] = {
    "tool_choice": "none",
    "best_of": 1,
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
    """A rejected request: HTTP status, message, parameter and OpenAI's error code. Each API has its own form of it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class Reply:
    """Text of a response, and its tool calls in OpenAI's format with arguments as an object."""

    text: str
    calls: tuple[dict[str, Any], ...] = ()
    stop: str | None = None
    """The request's stop string that ended the text."""


@dataclass(frozen=True)
class Answer:
    """Prompts and their responses, the same number for each prompt, in order."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[Completion, ...]
    replies: tuple[Reply, ...]

    @property
    def usage(self) -> tuple[int, int]:
        """Number of tokens of the prompts and of the responses."""
        return sum(map(len, self.prompts)), sum(len(one.tokens) for one in self.completions)


class WireRequest(BaseModel):
    """Body of a request in any API."""

    model_config = ConfigDict(extra="allow")
    harmless: ClassVar[frozenset[str]] = HARMLESS
    """Parameters that are ignored, because they do not change sampling."""


class ApiRequest(WireRequest):
    """Parameters of all requests; None if not given."""

    source: ClassVar[str]
    """Name of the prompt's parameter."""
    harmless = HARMLESS | {
        "return_token_ids",
        "parallel_tool_calls",
        "include_reasoning",
        "reasoning_effort",
        "verbosity",
    }

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = None
    n: int | None = Field(default=None, gt=0, le=128)
    max_tokens: int | None = Field(default=None, gt=0)
    stop: list[StopString] | None = None
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

    def reply(self, completion: Completion, tokenizer: ChatTokenizer) -> Reply:
        """Return what a response says, up to the request's stop string. Ids and logprobs keep all tokens."""
        text = tokenizer.text(completion.tokens)
        place, stop = min(((text.index(stop), stop) for stop in self.stop or () if stop in text), default=(None, None))
        return Reply(text[:place], stop=stop)

    def shown(self, text: str, tokenizer: ChatTokenizer) -> int:
        """Return the number of characters of an unfinished response that a stream may show."""
        return held_back(text, self.stop or ())

    def starts_call(self, tokens: np.ndarray, tokenizer: ChatTokenizer) -> bool:
        """Return whether one of the tokens starts a tool call. Its text lacks special tokens."""
        return False


ChoiceProgress = Callable[[int, Completion], None]
"""Receives the index of a choice and its tokens so far."""


class CompletionHandler(Protocol):
    """Answers the requests of one key."""

    async def respond(self, asked: ApiRequest, progress: ChoiceProgress | None = None) -> Answer:
        """Answer one request; report the tokens so far if it streams. Raises RefusedError."""
        ...


def read_request[T: WireRequest](kind: type[T], content: Any) -> T:
    """Parse the body of a request. Raises RefusedError: it is invalid or has an unsupported parameter."""
    try:
        asked = kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise RefusedError(400, f"{where}: {first['msg']}", where) from None
    for name, value in (asked.model_extra or {}).items():
        changes = value not in (None, [], {}, "", False) and value != _NEUTRAL.get(name)
        if name not in kind.harmless and changes:
            instead = _INSTEAD.get(name, "leave it out")
            raise RefusedError(400, f"{name} = {value!r:.60} is not supported here: {instead}", name)
    return asked


class ChatRequest(ApiRequest):
    """Parameters of a chat completion."""

    source = "messages"

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
            messages = read_messages(self.messages, self.source)
        except DataError as error:
            raise RefusedError(400, str(error), self.source) from None
        if messages[-1]["role"] == "assistant":
            rule = "the last message is the assistant's; end with another role"
            raise RefusedError(400, f"{self.source}: {rule}", self.source)
        return messages

    @cached_property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model may call. Raises RefusedError: a tool is invalid, or a call is forced."""
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
        tools = len(json.dumps(self.tools)) if self.tools else 0
        return sum(_characters(message.get("content")) for message in self.messages) + tools

    def prompts(self, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
        tools = self.offered
        if tools and not tokenizer.takes_tools:
            rule = (
                "the model's chat template does not write tools, or has an unknown call format (docs/environments.md)"
            )
            fix = "describe the tools in a message, or set policy.tokenizer.chat_template"
            raise RefusedError(400, f"tools: {rule}: {fix}", "tools")
        try:
            return (tuple(tokenizer.prompt(self.chat(), tools)),)
        except DataError as error:
            raise RefusedError(400, str(error), self.source) from None

    def reply(self, completion: Completion, tokenizer: ChatTokenizer) -> Reply:
        """See `ApiRequest.reply`. As in vLLM, an unreadable call makes the response a text, and the client checks calls
        against the tools. So does a call that the limit on tokens cuts off."""
        tools = self.offered
        before, written = tokenizer.written_calls(completion.tokens) if tools else ("", [])
        is_cut = completion.finish_reason == "length" and any(call.is_open for call in written[-1:])
        if not written or is_cut or any(call.trouble for call in written):
            return super().reply(completion, tokenizer)
        calls = checked_calls(written, tools, turn=0)[: 1 if self.parallel_tool_calls is False else None]
        # `checked_calls` counts ids within an episode, which a request does not know.
        named = [
            {"id": uuid.uuid4().hex[:_ID_LETTERS], "type": "function", "function": call["function"]} for call in calls
        ]
        return Reply(before.rstrip(), tuple(named))

    def shown(self, text: str, tokenizer: ChatTokenizer) -> int:
        """Hold back text that may start a tool call until the response ends, and whitespace that may precede one."""
        if not self.offered:
            return super().shown(text, tokenizer)
        marker = tokenizer.call_marker
        if not marker and text.lstrip()[:1] in ("", "{"):
            return 0
        return len(text[: held_back(text, [*(self.stop or ()), *marker.split()[:1]])].rstrip())

    def starts_call(self, tokens: np.ndarray, tokenizer: ChatTokenizer) -> bool:
        return bool(self.offered) and tokenizer.call_token in tokens.tolist()


class CompletionRequest(ApiRequest):
    """Parameters of a completion."""

    source = "prompt"

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


def joined(messages: Iterable[Message]) -> list[Message]:
    """Join what other APIs split: the system messages at the start, and adjacent messages of the user or the assistant.
    A later system message becomes the user's, because many templates take one at the start only."""
    found = list[Message]()
    is_start = True
    for message in messages:
        is_start = is_start and message["role"] == "system"
        if message["role"] == "system" and not is_start:
            message = {**message, "role": "user"}
        if found and message["role"] == found[-1]["role"] != "tool":
            found[-1] = _one_message(found[-1], message)
        else:
            found.append(message)
    return found


def _one_message(first: Message, second: Message) -> Message:
    """Return one message with the texts and the calls of two."""
    both = {key: [one[key] for one in (first, second) if one.get(key)] for key in {**first, **second} if key != "role"}
    calls = [call for calls in both.pop("tool_calls", []) for call in calls]
    texts = {key: "\n\n".join(values) for key, values in both.items()}
    return {"role": first["role"], "content": "", **texts, **({"tool_calls": calls} if calls else {})}


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
