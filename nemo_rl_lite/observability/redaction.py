"""Secrets that a user gave in a configuration do not go to trackers or into pages that are passed on."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(r"(^|_)(api_?key|access_?key|secret|password|passwd|token|credentials?)$", re.IGNORECASE)
# user:password@ in an address.
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
# An override on a command line, quoted or not.
_OVERRIDE = re.compile(r"(?P<key>[\w.+~/-]+)=(?P<value>'[^']*'|\"[^\"]*\"|\S+)")


def redact(value: Any, key: str = "") -> Any:
    """A configuration with everything hidden that its key calls a secret, and what an address has of one."""
    if isinstance(value, Mapping):
        return {name: redact(child, name) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(child, key) for child in value]
    if isinstance(value, str):
        return HIDDEN if value and _is_secret(key) else _IN_ADDRESS.sub(f"{HIDDEN}@", value)
    return value


def redact_command(command: str) -> str:
    """The same of a command line's overrides."""

    def hide(match: re.Match[str]) -> str:
        return f"{match['key']}={HIDDEN}" if _is_secret(match["key"].rpartition(".")[2]) else match[0]

    return _IN_ADDRESS.sub(f"{HIDDEN}@", _OVERRIDE.sub(hide, command))


def _is_secret(key: str) -> bool:
    return bool(_SECRET.search(key))
