"""OpenAI's completions: a response that continues a text or token ids, without a chat template."""

import uuid
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from pydantic import Field

from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.endpoint.protocol import Answer, Asked, RefusedError, answer_body
from nemo_rl_lite.generation.interface import Completion


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
