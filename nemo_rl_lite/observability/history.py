"""What a run has logged before it was ended and goes on."""

import json
from pathlib import Path

# Beside metrics.jsonl: lines of steps that were taken again.
UNDONE_FILE = "metrics-undone.jsonl"


def rewind(path: Path, step: int) -> list[dict[str, float]]:
    """Leave in `path` the lines of steps up to `step` and return their metrics; the others go to UNDONE_FILE. A last
    line that was cut short is one of these."""
    if not path.exists():
        return []
    kept: list[str] = []
    undone: list[str] = []
    history = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            of_this_run = entry["step"] <= step
        except (ValueError, KeyError, TypeError):
            of_this_run, entry = False, {}
        (kept if of_this_run else undone).append(line)
        if of_this_run:
            history.append(
                {name: float(value) for name, value in entry.items() if value is not None and name != "time"}
            )
    if undone:
        with (path.parent / UNDONE_FILE).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in undone)
        remaining = path.with_name(f".{path.name}")
        remaining.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        remaining.replace(path)
    return history
