"""Logs of a resumed run: entries of steps that will be repeated are moved away."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def rewind(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep the entries up to `step` of a file of JSON lines, each with its `step`, and return them. Move later entries,
    whose steps will be repeated, and incomplete lines to `<name>-undone.jsonl` in the same folder."""
    if not path.exists():
        return []
    kept, undone, entries = [], [], []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        entry = _parsed(line)
        if entry is not None and entry["step"] <= step:
            kept.append(line)
            entries.append(entry)
        else:
            undone.append(line.rstrip("\n") + "\n")
    if undone:
        with path.with_stem(f"{path.stem}-undone").open("a", encoding="utf-8") as file:
            file.writelines(undone)
        remaining = path.with_name(f".{path.name}")
        remaining.write_text("".join(kept), encoding="utf-8")
        remaining.replace(path)
    return entries


def set_aside(files: Iterable[Path], folder: Path) -> None:
    """Move the files of steps that will be repeated to `folder`."""
    for file in files:
        folder.mkdir(exist_ok=True)
        file.replace(folder / file.name)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        return entry if line.endswith("\n") and entry["step"] >= 0 else None
    except (ValueError, KeyError, TypeError):
        return None
