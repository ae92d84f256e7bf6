"""Translate NeMo-RL's names of keys, and short names of ours, by configs/aliases.yaml.

A counterpart made of overrides replaces the name. A mapping has a counterpart for each value. A counterpart that begins
with `nothing:` is the reason for no effect here. All others are sentences, for `keys.unknown_key`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override

from nemo_rl_lite.config.keys import (
    ALGORITHM_SECTIONS,
    DEFAULT_ALGORITHM,
    NOTHING,
    algorithm_of_file,
    answer_to,
    chooses_file,
    is_open,
    known_keys,
    parse_override,
    to_our_key,
)

_OVERRIDES = re.compile(r"[a-z][\w.]*=\S+(?: [a-z][\w.]*=\S+)*")
# `{}` is the value that was given, `{2}` the third of a list, `{*1024}` its product.
_PLACE = re.compile(r"\{(\d*|\*\d+)\}")
_REFERENCE = re.compile(r"\$\{(\.*)([a-zA-Z_][\w.]*)\}")
# Ends the note on a value that both launchers have.
SAME = "this is always the case"
_CHOICES = ("algorithm", "recipes")


class FromFile(str):
    """An override from a file, and its place there."""

    place: str

    def __new__(cls, text: str, place: str) -> "FromFile":
        made = super().__new__(cls, text)
        made.place = place
        return made


@dataclass(frozen=True)
class Meaning:
    """Our overrides for a key of another name, and a note on it."""

    overrides: tuple[str, ...]
    note: str


def in_our_names(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command's overrides by our names, and a note on each that had another.

    A section of NeMo-RL such as `dpo` chooses its algorithm if the command chooses none.
    """
    parsed = [(argument, parse_override(argument)) for argument in arguments]
    ours, told = list[str](), list[str]()
    keys = [one.key_or_group for _, one in parsed if one]
    file = next((str(one.value()) for _, one in parsed if one and one.key_or_group == "algorithm"), None)
    chosen = algorithm_of_file(file) if file else None
    sections = {key.split(".")[0] for key in keys} & set(ALGORITHM_SECTIONS) - {DEFAULT_ALGORITHM}
    if len(sections) == 1 and not set(keys) & set(_CHOICES):
        chosen = sections.pop()
        ours.append(f"algorithm={chosen}")
        told.append(f"{chosen}.* chooses algorithm={chosen}")
    setters: dict[str, str] = {}
    for argument, one in parsed:
        found = None if one is None else _meaning_of(one, chosen or DEFAULT_ALGORITHM)
        ours += [argument] if found is None else _from_there(argument, found.overrides)
        told += [] if found is None else [found.note]
        told += _set_twice(argument, (argument,) if found is None else found.overrides, setters)
    return ours, told


def _set_twice(argument: str, overrides: Sequence[str], setters: dict[str, str]) -> list[str]:
    """Return a note if an earlier argument with another name sets the same key. `setters` has the argument of each key
    so far. A command's argument replaces a file's without a note."""
    told = []
    for key in (one.partition("=")[0].lstrip("+") for one in overrides):
        earlier = setters.get(key, argument)
        setters[key] = argument
        names = {one.partition("=")[0].lstrip("+") for one in (earlier, argument)}
        if len(names) == 2 and isinstance(earlier, FromFile) == isinstance(argument, FromFile):
            told.append(f"{earlier} and {argument} both set {key}; the last one counts")
    return told


def _from_there(argument: str, overrides: Sequence[str]) -> list[str]:
    """Return overrides that stand for an argument, with its place in a file."""
    return [FromFile(one, argument.place) if isinstance(argument, FromFile) else one for one in overrides]


def meaning(key: str, value: Any, text: str, algorithm: str) -> Meaning | None:
    """Return the meaning of a key of another name; None if it is one of ours, or has no counterpart.

    `text` is the `value` as it was written."""
    here, section = to_our_key(key), key.split(".")[0]
    switches = [one for one in (f"{here}.enabled", f"{here}_enabled") if one in known_keys()]
    if isinstance(value, bool) and switches:
        return Meaning((f"{switches[0]}={text}",), f"{key}={text} is {switches[0]}={text} here")
    if key in known_keys() or is_open(key) or (section in ALGORITHM_SECTIONS and section != algorithm):
        return None
    found = f"{here}={{}}" if here in known_keys(algorithm) or is_open(here) else answer_to(key, value)
    if not isinstance(found, str):
        return None
    if not found or found.startswith(NOTHING):
        return Meaning((), f"{key}={text} has no effect: {found.removeprefix(NOTHING).strip() or SAME}")
    if not _OVERRIDES.fullmatch(found):
        return None
    overrides = tuple(_filled(word, value, text) for word in found.split(" "))
    if isinstance(value, str) and [f"{value[2:-1]}={text}"] == list(overrides):
        # A reference of a key to itself.
        return Meaning((), f"{key}={text} has no effect: {SAME}")
    return Meaning(overrides, f"{key}={text} is {' '.join(overrides)} here")


def with_our_references(key: str, value: Any) -> Any:
    """Return the value of a key with references such as `${grpo.seed}` or `${.top_p}` by our names."""
    if not isinstance(value, str):
        return value

    def ours(match: re.Match[str]) -> str:
        above, parts = len(match[1]), key.split(".")
        whole = ".".join([*(parts[:-above] if above else []), match[2]])
        return f"${{{to_our_key(whole)}}}"

    return _REFERENCE.sub(ours, value)


def _meaning_of(one: Override, algorithm: str) -> Meaning | None:
    if chooses_file(one) or one.is_delete() or one.package is not None or "=" not in (one.input_line or ""):
        return None
    value = None if one.is_sweep_override() else one.value()
    key, text = one.key_or_group, (one.input_line or "").partition("=")[2]
    return meaning(key, with_our_references(key, value), with_our_references(key, text), algorithm)


def _filled(answer: str, value: Any, text: str) -> str:
    """Put a value into a counterpart."""

    def place(match: re.Match[str]) -> str:
        part = match[1]
        if part.startswith("*") and isinstance(value, int | float):
            return str(int(value * int(part[1:])))
        return str(value[int(part)]) if part.isdecimal() and isinstance(value, list) else text

    return _PLACE.sub(place, answer)
