"""Secrets that a user gave in a configuration do not go to trackers or into pages that are passed on."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

HIDDEN = "REDACTED"
_KINDS = r"(?:api|access|secret|private)[_-]?keys?|secrets?|passwords?|passwd|token|auth(?:orization)?|credentials?"
_NAMES = rf"(?:[\w-]*[_-])?(?:{_KINDS})"
_SECRET = re.compile(rf"^{_NAMES}$", re.IGNORECASE)
# user:password@ in an address, and what an address is asked with.
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s]+@")
# `{api_key: ...}` in an override, `password=...` in an address.
_IN_TEXT = re.compile(rf"(?<![\w-])(['\"]?{_NAMES}['\"]?\s*[:=]\s*)('[^']*'|\"[^\"]*\"|[^\s,}}\]&'\"]+)", re.IGNORECASE)


def redact(value: Any, key: str = "") -> Any:
    """A configuration with everything hidden that its key calls a secret, and what an address has of one."""
    if isinstance(value, Mapping):
        return {name: redact(child, name) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(child, key) for child in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET.search(key) else redact_text(value)
    return value


def redact_text(text: str) -> str:
    """The same of a text: what follows the name of a secret, and what an address has of one."""
    return _IN_TEXT.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(f"{HIDDEN}@", text))


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
