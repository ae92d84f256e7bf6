"""What OpenAI's completions and chat completions have in common: what a request may ask for, and what it gets. Neither
HTTP nor engines are known here."""

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from nemo_rl_lite.data.messages import Message, read_messages
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.data.tools import Tool, callable_tools, checked_calls
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Completion

# These change nothing that the policy samples.
_HARMLESS = frozenset(
    {"user", "store", "metadata", "stream_options", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"return_token_ids", "parallel_tool_calls", "include_reasoning"}
)
# What to do in place of a parameter that is refused.
_INSTEAD = {
    "tools": "the chat template writes them, so ask /chat/completions",
    "functions": "name them in tools, as OpenAI's newer API does",
    "stop_token_ids": "those of generation.stop_token_ids hold for all responses",
    "response_format": "describe the format in a message",
    "top_logprobs": "the engines keep the logprob of the sampled token alone",
    "echo": "the engines keep no logprobs of a prompt; write the prompt before the text yourself",
}
# Values with which these parameters change nothing.
_NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
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


@dataclass(frozen=True)
class Answer:
    """Responses, and the tokens that they continue: of each prompt in turn there are equally many, and at least one."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[Completion, ...]


class Asked(BaseModel):
    """The parameters that all requests have. None: not given."""

    model_config = ConfigDict(extra="allow")
    source: ClassVar[str]
    """The parameter that has what the response continues."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = Field(default=None, gt=0, le=128)
    max_tokens: int | None = Field(default=None, gt=0)
    stop: list[Annotated[str, StringConstraints(min_length=1)]] | None = None
    stream: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @property
    def most_tokens(self) -> int | None:
        """How long a response may be."""
        return self.max_tokens

    @abstractmethod
    def prompts(self, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
        """The tokens that responses continue. Raises RefusedError: there are none, or no engine takes them."""

    def text(self, completion: Completion, tokenizer: ChatTokenizer) -> str:
        """The text of a response. It ends before the request's own stop string; ids and logprobs are of all tokens."""
        text = tokenizer.text(completion.tokens)
        return text[: min((text.index(stop) for stop in self.stop or () if stop in text), default=None)]

    @abstractmethod
    def body(self, answer: Answer, tokenizer: ChatTokenizer, model: str) -> dict[str, Any]:
        """The answer in OpenAI's format, with vLLM's fields for token ids."""

    @abstractmethod
    def chunk(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The whole answer as the one chunk of a stream."""


class CompletionHandler(Protocol):
    """Answers the requests that come with one key."""

    async def respond(self, asked: Asked) -> Answer:
        """Answer a request. Raises RefusedError: it cannot be answered."""
        ...


def read_request[T: Asked](kind: type[T], content: Any) -> T:
    """Read the body of a request of a kind. Raises RefusedError: it is none, or asks for what is not done here."""
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


def answer_body(answer: Answer, choices: Sequence[Mapping[str, Any]], model: str) -> dict[str, Any]:
    """What the answers to all kinds of requests have; `choices` has what is particular to the kind, one for each
    response. `system_fingerprint` names the newest step that made weights which sampled the responses."""
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


# Mistral's templates take no other length.
_ID_LETTERS = 9


class ChatRequest(Asked):
    """The parameters of a chat completion."""

    source = "messages"

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(default=None, gt=0)
    logprobs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        """How long a response may be, under either of its names."""
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

    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model may call. Raises RefusedError: they are no functions, or one has to be called."""
        if self.tool_choice not in (None, "auto", "none"):
            rule = 'nothing makes the engines write a call; leave it out, or choose "auto" or "none"'
            raise RefusedError(
                400, f"tool_choice = {self.tool_choice!r:.60} is not supported here: {rule}", "tool_choice"
            )
        try:
            tools = callable_tools(self.tools or (), "tools")
        except DataError as error:
            raise RefusedError(400, str(error), "tools") from None
        return () if self.tool_choice == "none" else tools

    def prompts(self, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
        """See `Asked.prompts`. It is one. Raises RefusedError also where the tokenizer does not take the tools."""
        tools = self.offered()
        if tools and not tokenizer.takes_tools:
            rule = (
                "the model's chat template does not write them, or writes calls in a way that is not known "
                "(docs/rollouts.md lists the known ones)"
            )
            fix = "describe the tools in a message, or name another template with policy.tokenizer.chat_template"
            raise RefusedError(400, f"tools: {rule}: {fix}", "tools")
        try:
            return (tuple(tokenizer.prompt(self.chat(), tools)),)
        except DataError as error:
            raise RefusedError(400, str(error), "messages") from None

    def body(self, answer: Answer, tokenizer: ChatTokenizer, model: str) -> dict[str, Any]:
        """See `Asked.body`."""
        tools = self.offered()
        choices = [
            {
                **self._said(completion, tokenizer, tools),
                "logprobs": {"content": _logprobs(completion, tokenizer)} if self.logprobs else None,
            }
            for completion in answer.completions
        ]
        (prompt,) = answer.prompts
        own = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "prompt_token_ids": list(prompt)}
        return answer_body(answer, choices, model) | own

    def chunk(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Asked.chunk`."""
        choices = []
        for choice in body["choices"]:
            delta = dict(choice["message"])
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
            choices.append({name: value for name, value in choice.items() if name != "message"} | {"delta": delta})
        return {**body, "object": "chat.completion.chunk", "choices": choices}

    def _said(self, completion: Completion, tokenizer: ChatTokenizer, tools: Sequence[Tool]) -> dict[str, Any]:
        """The message of a response, with its calls of `tools`, and why it ended where that is a call. As in vLLM a
        response is text where one of its calls cannot be read, and whether calls fit the tools is for the client to
        say."""
        before, written = tokenizer.written_calls(completion.tokens) if tools else ("", [])
        if not written or any(call.trouble for call in written):
            return {"message": {"role": "assistant", "content": self.text(completion, tokenizer)}}
        calls = checked_calls(written, tools, turn=0)[: 1 if self.parallel_tool_calls is False else None]
        message = {"content": before.rstrip() or None, "tool_calls": [_as_openai(call["function"]) for call in calls]}
        return {"message": {"role": "assistant", **message}, "finish_reason": "tool_calls"}


def _as_openai(function: Mapping[str, Any]) -> dict[str, Any]:
    """A call as OpenAI writes it, with the arguments as text."""
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    identity = uuid.uuid4().hex[:_ID_LETTERS]
    return {"id": identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _logprobs(completion: Completion, tokenizer: ChatTokenizer) -> list[dict[str, Any]]:
    pieces = [tokenizer.piece(token) for token in completion.tokens]
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(pieces, completion.logprobs, strict=True)
    ]


class CompletionRequest(Asked):
    """The parameters of a completion."""

    source = "prompt"

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0)

    def prompts(self, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
        """See `Asked.prompts`. Raises RefusedError also for more `logprobs` than the engines keep."""
        if self.logprobs and (self.logprobs > 1 or self.temperature != 0):
            rule = "the engines keep the logprob of the sampled token alone, which is the likeliest at temperature 0"
            fix = "ask for logprobs = 0, or for 1 with temperature = 0"
            raise RefusedError(400, f"logprobs = {self.logprobs}: {rule}; {fix}", "logprobs")
        several = isinstance(self.prompt, list) and self.prompt and not _is_token(self.prompt[0])
        return tuple(_tokens(prompt, tokenizer) for prompt in (self.prompt if several else [self.prompt]))

    def body(self, answer: Answer, tokenizer: ChatTokenizer, model: str) -> dict[str, Any]:
        """See `Asked.body`."""
        each = len(answer.completions) // len(answer.prompts)
        choices = [
            {
                "text": self.text(completion, tokenizer),
                "logprobs": None if self.logprobs is None else self._logprobs(completion, tokenizer),
                "prompt_token_ids": list(answer.prompts[index // each]),
            }
            for index, completion in enumerate(answer.completions)
        ]
        return answer_body(answer, choices, model) | {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}

    def chunk(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Asked.chunk`. OpenAI's chunks of completions have the form of whole answers."""
        return body

    def _logprobs(self, completion: Completion, tokenizer: ChatTokenizer) -> dict[str, Any]:
        pieces = [tokenizer.piece(token) for token in completion.tokens]
        pairs = zip(pieces, completion.logprobs, strict=True)
        return {
            "tokens": pieces,
            "token_logprobs": list(completion.logprobs),
            "top_logprobs": [{piece: logprob} for piece, logprob in pairs] if self.logprobs else None,
            "text_offset": list(accumulate(map(len, pieces[:-1]), initial=0)),
        }


def _is_token(given: Any) -> bool:
    return type(given) is int


def _tokens(prompt: Any, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The tokens of one prompt. Raises RefusedError: it is none."""
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
