"""One request and its answer in the form of an API, and the text that a stream shows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.serving.protocol import Answer, ApiRequest, RefusedError

Event = Mapping[str, Any]
"""One message of a stream. Its field `type`, if any, is the name of the server-sent event."""
# End of a text whose last character needs more tokens.
_HALF = "\ufffd"


class Exchange[Asked: ApiRequest](ABC):
    """A request of one API and the form of its answer."""

    stream_end: ClassVar[str] = ""
    """Text after the last event of a stream."""

    def __init__(self, asked: Asked, tokenizer: ChatTokenizer, model: str):
        """`asked`: the request in the internal form."""
        self.asked, self._tokenizer, self._model = asked, tokenizer, model

    @classmethod
    @abstractmethod
    def read(cls, content: Any, tokenizer: ChatTokenizer, model: str) -> "Exchange[Asked]":
        """Read the JSON body of a request. Raises RefusedError: it is invalid or has an unsupported parameter."""

    @abstractmethod
    def body(self, answer: Answer) -> dict[str, Any]:
        """Return the answer in the API's form."""

    @abstractmethod
    def begun(self, index: int, so_far: Completion) -> Iterator[Event]:
        """Yield the events for the tokens so far of a choice."""

    @abstractmethod
    def ended(self, answer: Answer) -> Iterator[Event]:
        """Yield the unsent rest of the answer."""

    @staticmethod
    @abstractmethod
    def refusal(refused: RefusedError) -> dict[str, Any]:
        """Return the body of a rejection."""

    def failed(self, refused: RefusedError) -> Event:
        """Return the last event of a stream that fails."""
        return self.refusal(refused)


@dataclass
class ShownText:
    """The decoded text of an unfinished response, and how many of its characters a stream has shown."""

    asked: ApiRequest
    tokenizer: ChatTokenizer
    text: str = field(default="", init=False)
    characters: int = field(default=0, init=False)
    # Number of tokens seen, and whether one of them started a call.
    _seen: int = field(default=0, init=False)
    _has_call: bool = field(default=False, init=False)
    # Window of tokens to decode again: its start, and the end of the tokens in `text`.
    _start: int = field(default=0, init=False)
    _end: int = field(default=0, init=False)

    def more(self, so_far: Completion) -> str:
        """Return the text that a stream may show now and has not shown before."""
        new, self._seen = so_far.tokens[self._seen :], len(so_far.tokens)
        self._has_call = self._has_call or self.asked.starts_call(new, self.tokenizer)
        if self._has_call:
            return ""
        self._decode(so_far.tokens)
        before = self.characters
        self.characters = max(before, self.asked.shown(self.text, self.tokenizer))
        return self.text[before : self.characters]

    def rest(self, text: str) -> str:
        """Return the part of the whole text that was not shown."""
        return text[self.characters :]

    def _decode(self, tokens: np.ndarray) -> None:
        """Add the text of new tokens, unless it ends within a character. Earlier tokens are decoded with them, because
        some decoders drop a leading space."""
        old, new = self.tokenizer.text(tokens[self._start : self._end]), self.tokenizer.text(tokens[self._start :])
        if len(new) > len(old) and not new.endswith(_HALF):
            self.text += new[len(old) :]
            self._start, self._end = self._end, len(tokens)
