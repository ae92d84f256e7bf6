"""Writes responses as OpenAI's stream of chunks while the engine samples them."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.serving.protocol import Answer, ApiRequest

Chunk = Mapping[str, Any]
Send = Callable[[Chunk], None]
# End of a text whose last character needs more tokens.
_HALF = "\ufffd"


@dataclass
class _Sent:
    """The decoded and the sent part of a response."""

    text: str = ""
    characters: int = 0
    tokens: int = 0
    # Window of tokens to decode again: its start, and the end of the tokens in `text`.
    _start: int = 0
    _end: int = 0

    def decode(self, tokens: np.ndarray, tokenizer: ChatTokenizer) -> None:
        """Add the text of new tokens, unless it ends within a character. Earlier tokens are decoded with them, because
        some decoders drop a leading space."""
        old, new = tokenizer.text(tokens[self._start : self._end]), tokenizer.text(tokens[self._start :])
        if len(new) > len(old) and not new.endswith(_HALF):
            self.text += new[len(old) :]
            self._start, self._end = self._end, len(tokens)


class StreamWriter:
    """Writes the chunks of one request."""

    def __init__(self, asked: ApiRequest, tokenizer: ChatTokenizer, model: str):
        self._asked, self._tokenizer, self._model = asked, tokenizer, model
        self._id, self._created = f"{asked.id_prefix}-{uuid.uuid4().hex}", int(time.time())
        self._sent: dict[int, _Sent] = {}

    def begun(self, index: int, so_far: Completion) -> Iterator[Chunk]:
        """Yield the chunks for the tokens so far of a choice."""
        sent = self._sent.setdefault(index, _Sent())
        sent.decode(so_far.tokens, self._tokenizer)
        shown = self._asked.shown(sent.text, so_far, self._tokenizer)
        if shown > sent.characters:
            yield from self._opening(index, sent, so_far)
            text, sent.characters = sent.text[sent.characters : shown], shown
            yield self._chunk(index, self._asked.delta(text), so_far.versions[-1][0], self._tokens(sent, so_far))

    def ended(self, answer: Answer) -> Iterator[Chunk]:
        """Yield the unsent rest of the choices with their finish reasons, then the usage if requested."""
        body = self._asked.body(answer, self._tokenizer, self._model)
        for choice, completion in zip(body["choices"], answer.completions, strict=True):
            index, sent = choice["index"], self._sent.setdefault(choice["index"], _Sent())
            yield from self._opening(index, sent, completion)
            rest = {"finish_reason": choice["finish_reason"], **self._tokens(sent, completion)}
            last = self._asked.last_delta(choice, sent.characters)
            yield self._chunk(index, last, completion.versions[-1][0], rest)
        if (self._asked.stream_options or {}).get("include_usage"):
            yield {**self._head(), "choices": [], "usage": body["usage"]}

    def _opening(self, index: int, sent: _Sent, so_far: Completion) -> Iterator[Chunk]:
        """Yield a choice's first chunk, which has the role, if nothing was sent yet."""
        if not sent.tokens and (opening := self._asked.opening_delta()):
            yield self._chunk(index, opening, so_far.versions[-1][0], {})

    def _tokens(self, sent: _Sent, so_far: Completion) -> dict[str, Any]:
        """Return the ids and logprobs of the unsent tokens."""
        first, sent.tokens = sent.tokens, len(so_far.tokens)
        new = replace(
            so_far,
            tokens=so_far.tokens[first:],
            logprobs=so_far.logprobs[first:],
            top_logprobs=so_far.top_logprobs[first:],
        )
        return {"token_ids": new.tokens.tolist(), "logprobs": self._asked.logprobs_of(new, self._tokenizer)}

    def _chunk(self, index: int, delta: Mapping[str, Any], version: int, rest: Mapping[str, Any]) -> Chunk:
        choice = {"index": index, "finish_reason": None, **delta, **rest}
        return {**self._head(), "system_fingerprint": f"step-{version}", "choices": [choice]}

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": self._asked.chunk_object, "created": self._created, "model": self._model}
