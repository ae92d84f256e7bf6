"""A call of a user's code in another process: what is called, its result, and why it has none."""

import os
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LONGEST_ERROR = 300
# The folder of this package, which is not a user's code.
_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


class CallError(Exception):
    """A call has no result: the code raised (the message is its error, `details` its traceback), was late, or its
    process ended."""

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


class LateError(CallError):
    """There is no result within the time limit."""


class StartError(CallError):
    """The processes do not start; the message says what they do instead."""


def as_call_error(error: BaseException) -> CallError:
    """Describe what a user's code raised in one readable line, since some errors quote a whole response."""
    text = f"{type(error).__name__}: {error}"
    short = text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."
    return CallError(short, "".join(traceback.format_exception(error)))


def place_of(error: BaseException) -> str:
    """Return the last line of the user's file that an error came through: " (FILE, line N)". Nothing where this package
    raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_PACKAGE)]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


@dataclass(frozen=True)
class Target:
    """What the processes hold: `path`, the dotted path of a class of this package, made with `arguments`. `title` names
    a process and `limit` the time limit in messages."""

    path: str
    arguments: Mapping[str, Any]
    title: str
    limit: str


@dataclass(eq=False)
class Call:
    """A method of the target that is to be called, and the future of its result."""

    method: str
    arguments: tuple[Any, ...]
    session: int | None
    future: Future = field(default_factory=Future)

    def settle(self, value: Any) -> None:
        """Give the future its result, or the `CallError` that it has instead."""
        if self.future.done():
            return
        if isinstance(value, CallError):
            self.future.set_exception(value)
        else:
            self.future.set_result(value)
