"""A message for an end of this process that Python cannot see: SIGKILL, or `_Exit` in C code.

Ray's client calls `_Exit` when it uses the object store of a raylet that has died.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

MESSAGE = (
    "the command was killed, or Ray ended it because Ray's raylet died; often the machine is short of memory. The same "
    "command resumes a run from its last checkpoint"
)
# A shell starts sooner than Python. It reads a line or the end of the pipe, whichever comes first.
_SCRIPT = """trap '' HUP INT TERM; read -r line || echo "$0" >&2"""
_reporters: list[subprocess.Popen[bytes]] = []


@contextmanager
def death_is_reported() -> Iterator[None]:
    """Print MESSAGE on standard error if this process ends within the block, except by `exit_at_once`."""
    _reporters.append(subprocess.Popen(["sh", "-c", _SCRIPT, MESSAGE], stdin=subprocess.PIPE, start_new_session=True))
    try:
        yield
    finally:
        _dismiss()


def exit_at_once(status: int) -> NoReturn:
    """End this process without cleanup, after its own last words."""
    _dismiss()
    os._exit(status)


def _dismiss() -> None:
    while _reporters:
        with suppress(OSError):
            _reporters.pop().communicate(b"\n")
