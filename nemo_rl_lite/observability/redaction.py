"""Removes secrets of a configuration before it goes to files, to trackers or into a report."""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from typing import Any

HIDDEN = "REDACTED"
_KINDS = (
    r"(?:api|access|secret|private)[_-]?keys?|secrets?|passwords?|passwd|passphrase|pwd|token|auth(?:orization)?|bearer"
    r"|pat|cookies?|sig(?:nature)?|credentials?"
)
_NAMES = rf"(?:(?:[\w-]*[_-])?(?:{_KINDS})|[\w-]+[_-]keys?)"
_SECRET = re.compile(rf"^{_NAMES}$", re.IGNORECASE)
# user:password@ in an address.
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s]+@")
_BEARER = re.compile(r"\bbearer\s+[^\s,'\"}}\]]+", re.IGNORECASE)
# `{api_key: ...}` in an override, `password=...` in an address.
_IN_TEXT = re.compile(rf"(?<![\w-])(['\"]?{_NAMES}['\"]?\s*[:=]\s*)('[^']*'|\"[^\"]*\"|[^\s,}}\]&'\"]+)", re.IGNORECASE)


def described(config: Any) -> dict[str, Any]:
    """A configuration (a dataclass) as it is written to files: all of it but its secrets."""
    return redact(dataclasses.asdict(config))


def redact(value: Any, key: str = "") -> Any:
    """Hide the values of a configuration whose keys name secrets, and credentials in addresses."""
    if isinstance(value, Mapping):
        return {name: redact(child, name) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(child, key) for child in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET.search(key) else redact_text(value)
    return value


def redact_text(text: str) -> str:
    """Hide in a text the values that follow the name of a secret, and credentials in addresses."""
    return _IN_TEXT.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(f"{HIDDEN}@", _BEARER.sub(HIDDEN, text)))


def redact_command(command: str) -> str:
    """Hide secrets in a command line's overrides. A command line that cannot be parsed becomes empty."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    return shlex.join(_word(word) for word in words)


def _word(word: str) -> str:
    path, is_override, value = word.partition("=")
    return f"{path}={redact(value, path.rpartition('.')[2])}" if is_override else str(redact(word))
