"""Turn arguments of Python into overrides of the command line: `max_num_steps=20` into `algorithm.max_num_steps=20`."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.keys import groups, is_open, known_keys
from nemo_rl_lite.errors import ConfigError, Violation

PathOf = Callable[[str, Any], str]
"""Returns the path by which a configuration names a function or class; the first argument is the key."""
# Characters of keys that a mapping's literal can have.
_PLAIN_KEY = re.compile(r"[\w./+-]+")
# Texts that need no quotes.
_PLAIN_TEXT = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z/][\w./:+-]*", re.IGNORECASE)


def overrides_of(arguments: Mapping[str, Any], algorithm: str, path_of: PathOf) -> Iterator[str]:
    """Yield the overrides of an algorithm's arguments. A name is a group (`generation="transformers"`), a section
    (`policy={"precision": "bfloat16"}`), a key, or the unique end of a key.

    Raises:
        ConfigError: several keys end with a name, or a value cannot be written.
    """
    for name, value in arguments.items():
        key = full_key(name, algorithm)
        if isinstance(value, Mapping) and not is_open(key):
            yield from overrides_of({f"{key}.{below}": one for below, one in value.items()}, algorithm, path_of)
        elif name in groups() and f"{name}.name" in known_keys(algorithm) and _is_own(name, value):
            yield f"{name}.name={literal(f'{name}.name', value, path_of)}"
        else:
            # The name of a group's file needs no quotes.
            yield f"{name}={value}" if name in groups() else f"{key}={literal(key, value, path_of)}"


def full_key(name: str, algorithm: str) -> str:
    """Return the full key of a name: the shallowest of the keys that end with it.

    Raises:
        ConfigError: there are several.
    """
    known = known_keys(algorithm)
    if name in known or name in groups() or is_open(name):
        return name
    ends = [key for key in known if key.endswith(f".{name}")]
    least = min((key.count(".") for key in ends), default=0)
    found = [key for key in ends if key.count(".") == least]
    if len(found) > 1:
        fix = " or ".join(f'overrides={{"{key}": ...}}' for key in found[:4])
        raise ConfigError([Violation(name, None, "several keys end with this name", fix)])
    # The command's own check reports unknown keys.
    return found[0] if found else name


def literal(key: str, value: Any, path_of: PathOf) -> str:
    """Return a value in the syntax of overrides. Functions and classes become paths.

    Raises:
        ConfigError: Hydra has no form for it.
    """
    # Scalars of numpy and torch.
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, str | Path):
        return text if _PLAIN_TEXT.fullmatch(text := str(value)) else _quoted(text)
    if isinstance(value, list | tuple):
        return f"[{','.join(literal(key, one, path_of) for one in value)}]"
    if isinstance(value, Mapping) and all(_PLAIN_KEY.fullmatch(str(one)) for one in value):
        return "{{{}}}".format(",".join(f"{one}:{literal(key, own, path_of)}" for one, own in value.items()))
    if callable(value):
        return literal(key, path_of(key, value), path_of)
    rule, fix = f"is a {type(value).__name__}", "a number, a text, a list, a mapping or a function"
    if isinstance(value, float):
        rule, fix = "is not finite", "give a finite number"
    raise ConfigError([Violation(key, f"{value!r:.80}", rule, fix)])


def _quoted(text: str) -> str:
    # Only backslashes in front of a quote have a meaning.
    return "'{}'".format(re.sub(r"(\\*)('|\Z)", lambda one: one[1] * 2 + (r"\'" if one[2] else ""), text))


def _is_own(group: str, value: Any) -> bool:
    """Return whether a value is a function, a class, or the path of one, rather than a file of the group."""
    return callable(value) or (isinstance(value, str) and "." in value and value not in groups()[group])
