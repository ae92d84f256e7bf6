"""What OpenAI's completions and chat completions have in common: what a request may ask for, and what it gets. Neither
HTTP nor engines are known here."""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from nemo_rl_lite.data.tokenizer import ChatTokenizer
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


class Respondent(Protocol):
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
