"""OpenAI's completions: a response that continues a text or token ids, without a chat template."""

import uuid
from collections.abc import Mapping
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator

from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.endpoint.protocol import Answer, Asked, RefusedError, answer_body
from nemo_rl_lite.generation.interface import Completion


class CompletionRequest(Asked):
    """The parameters of a completion."""

    source = "prompt"

    prompt: Any
    stop: list[Annotated[str, StringConstraints(min_length=1)]] | None = None
    logprobs: int | None = Field(default=None, ge=0)

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """See `Asked.stop_strings`."""
        return tuple(self.stop or ())

    def tokens(self, tokenizer: ChatTokenizer) -> tuple[int, ...]:
        """See `Asked.tokens`. Raises RefusedError also for more `logprobs` than the engines keep."""
        if self.logprobs and (self.logprobs > 1 or self.temperature != 0):
            rule = "the engines keep the logprob of the sampled token alone, which is the likeliest at temperature 0"
            fix = "ask for logprobs = 0, or for 1 with temperature = 0"
            raise RefusedError(400, f"logprobs = {self.logprobs}: {rule}; {fix}", "logprobs")
        if isinstance(self.prompt, str):
            tokens = tokenizer.opening(self.prompt)
        elif isinstance(self.prompt, list) and all(type(token) is int for token in self.prompt):
            tokens = self.prompt
        else:
            raise RefusedError(400, "prompt: each request has one, which is a text or a list of token ids", "prompt")
        if not tokens:
            raise RefusedError(400, "prompt: it has no tokens, and a response has to continue some", "prompt")
        highest = tokenizer.highest_token
        if unknown := [token for token in tokens if not 0 <= token <= highest]:
            raise RefusedError(400, f"prompt: {unknown[0]} is no token id, which are 0 to {highest}", "prompt")
        return tuple(tokens)

    def body(self, answer: Answer, tokenizer: ChatTokenizer, model: str) -> dict[str, Any]:
        """See `Asked.body`. The text ends before the request's stop string; ids and logprobs are of all tokens."""
        choices = [
            {
                "text": self._before_stop(tokenizer.text(completion.tokens)),
                "logprobs": None if self.logprobs is None else self._logprobs(completion, tokenizer),
            }
            for completion in answer.completions
        ]
        return answer_body(answer, choices, model) | {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}

    def chunk(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Asked.chunk`. OpenAI's chunks of completions have the form of whole answers."""
        return body

    def _before_stop(self, text: str) -> str:
        return text[: min((text.index(stop) for stop in self.stop_strings if stop in text), default=None)]

    def _logprobs(self, completion: Completion, tokenizer: ChatTokenizer) -> dict[str, Any]:
        pieces = [tokenizer.piece(token) for token in completion.tokens]
        pairs = zip(pieces, completion.logprobs, strict=True)
        return {
            "tokens": pieces,
            "token_logprobs": list(completion.logprobs),
            "top_logprobs": [{piece: logprob} for piece, logprob in pairs] if self.logprobs else None,
            "text_offset": list(accumulate(map(len, pieces[:-1]), initial=0)),
        }
