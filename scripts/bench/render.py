"""Render docs/benchmarks/*.json into docs/benchmarks/README.md. With --check, fail where that page is out of date."""

import json
import sys
from typing import Any

import record

PAGE = record.FOLDER / "README.md"


def main() -> None:
    records = [json.loads(path.read_text()) for path in sorted(record.FOLDER.glob("*.json"))]
    text = "\n".join(
        [
            "# Benchmarks",
            "",
            "Rendered by `python scripts/bench/render.py` from the JSON files beside it, with all repetitions.",
            "",
            *(line for one in records for line in render(one)),
        ]
    )
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == text else f"{PAGE} is out of date: run python scripts/bench/render.py")
    PAGE.write_text(text)


def render(one: dict[str, Any]) -> list[str]:
    """One record as a section."""
    hardware = one["hardware"]
    versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
    lines = [
        f"## {one['bench']} on {hardware['name']}",
        "",
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB; {one['date'][:10]}, commit "
        f"`{one['commit'][:9]}`; `{one['command']}`",
        "",
        f"{versions}.",
        "",
        "| measured | config | median | least | most | repetitions |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in one["results"]:
        numbers = (f"{value:.3g} {row['unit']}" for value in (row["median"], min(row["reps"]), max(row["reps"])))
        lines.append(f"| {row['name']} | {row['config']} | {' | '.join(numbers)} | {len(row['reps'])} |")
    lines += ["", "| target | wanted | measured | met |", "|---|---:|---:|---|"]
    for row in one["bars"]:
        lines.append(f"| {row['name']} | {row['target']} | {row['value']:.3g} | {'yes' if row['met'] else 'no'} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
