"""Read the comments of a YAML file of configs/: about the file, and about each key."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml


class UndocumentedError(Exception):
    """A key or a file of configs/ has no comment."""


@dataclass
class Comments:
    """The comments of a file of configs/: about the file, and about its keys (dotted paths within it)."""

    header: str
    keys: dict[str, str] = field(default_factory=dict)


@cache
def read_comments(file: Path) -> Comments:
    """Read a file's comments. A comment is about the key directly below it alone; one at the top, with a blank line or
    `defaults:` below it, is about the file."""
    lines = file.read_text().splitlines()
    end = _end_of_comment(lines, 0)
    about_file = end < len(lines) and (not lines[end].strip() or lines[end].startswith("defaults:"))
    comments = Comments(_text([line for line in lines[:end] if "@package" not in line]) if about_file else "")
    root = yaml.compose(file.read_text())
    if isinstance(root, yaml.MappingNode):
        _visit(root, "", lines, comments.keys)
    return comments


def _visit(node: yaml.MappingNode, prefix: str, lines: list[str], found: dict[str, str]) -> None:
    for key, value in node.value:
        line, path = key.start_mark.line, f"{prefix}{key.value}"
        comment = _text(lines[_start_of_comment(lines, line) : line])
        if comment and path != "defaults":
            found[path] = comment
        if isinstance(value, yaml.MappingNode):
            _visit(value, f"{path}.", lines, found)


def _end_of_comment(lines: list[str], place: int) -> int:
    while place < len(lines) and lines[place].startswith("#"):
        place += 1
    return place


def _start_of_comment(lines: list[str], place: int) -> int:
    while place and lines[place - 1].lstrip().startswith("#"):
        place -= 1
    return place


def _text(lines: list[str]) -> str:
    """Join a comment into one line; a line that is indented deeper is a command line and becomes code."""
    words = [line.strip().removeprefix("#") for line in lines]
    return " ".join(f"`{line.strip()}`" if line.startswith("   ") else line.strip() for line in words).strip()
