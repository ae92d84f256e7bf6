"""Secrets that a user gave in a configuration do not go to trackers or into pages that are passed on."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

HIDDEN = "REDACTED"
_SECRET = re.compile(r"(^|_)(api_?key|access_?key|secret|password|passwd|token|credentials?)$", re.IGNORECASE)
# user:password@ in an address.
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")


def redact(value: Any, key: str = "") -> Any:
    """A configuration with everything hidden that its key calls a secret, and what an address has of one."""
    if isinstance(value, Mapping):
        return {name: redact(child, name) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(child, key) for child in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET.search(key) else _IN_ADDRESS.sub(f"{HIDDEN}@", value)
    return value


def redact_command(command: str) -> str:
    """The same of a command line's overrides. Nothing is left of one that was cut short."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    return shlex.join(_word(word) for word in words)


def _word(word: str) -> str:
    path, is_override, value = word.partition("=")
    return f"{path}={redact(value, path.rpartition('.')[2])}" if is_override else str(redact(word))
