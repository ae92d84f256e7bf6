"""Render docs/benchmarks/*.json into docs/benchmarks/README.md and README.md. --check fails where one is stale."""

import json
import sys
from pathlib import Path
from typing import Any

import record

PAGE = record.FOLDER / "README.md"
README = record.ROOT / "README.md"
START, END = "<!-- quickstart table -->\n", "<!-- /quickstart table -->"


def main() -> None:
    records = [json.loads(path.read_text()) for path in sorted(record.FOLDER.glob("*.json"))]
    stale = [path for path, text in pages(records).items() if path.read_text() != text] if "--check" in sys.argv else []
    if stale:
        sys.exit(f"out of date: {', '.join(path.name for path in stale)}; run python scripts/bench/render.py")
    for path, text in pages(records).items():
        path.write_text(text)


def pages(records: list[dict[str, Any]]) -> dict[Path, str]:
    """Each page with its rendered text."""
    head = [
        "# Benchmarks",
        "",
        "Rendered by `python scripts/bench/render.py` from the JSON files beside it, with all repetitions.",
        "",
    ]
    readme = README.read_text()
    quickstart = next(one for one in records if one["bench"] == "quickstart")
    before, after = readme.split(START)[0], readme.split(END)[1]
    table = "\n".join(results_table(quickstart)) + "\n"
    return {
        PAGE: "\n".join([*head, *(line for one in records for line in section(one))]),
        README: before + START + table + END + after,
    }


def section(one: dict[str, Any]) -> list[str]:
    """One record: where, with what, what was measured, which targets were met."""
    hardware = one["hardware"]
    note = [one["note"], ""] if "note" in one else []
    versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB"
    if "gpus" in hardware:
        machine = f"{len(hardware['gpus'])} x {hardware['gpus'][0]['name']}; {machine}"
    commit = one["commit"].removesuffix("-dirty")[:9] + ("-dirty" if one["commit"].endswith("-dirty") else "")
    return [
        f"## {one['bench']} on {hardware['name']}",
        "",
        f"{machine}; {one['date'][:10]}, commit `{commit}`; `{one['command']}`; {versions}.",
        "",
        *note,
        *results_table(one),
        "",
        *bars_table(one),
    ]


def bars_table(one: dict[str, Any]) -> list[str]:
    """Targets, a row each; nothing where there are none."""
    if not one["bars"]:
        return []
    rows = (f"| {b['name']} | {b['target']} | {b['value']:.3g} | {'yes' if b['met'] else 'no'} |" for b in one["bars"])
    return ["| target | wanted | measured | met |", "|---|---:|---:|---|", *rows, ""]


def results_table(one: dict[str, Any]) -> list[str]:
    """What was measured, a row a quantity."""
    lines = ["| measured | median | least | most | unit | runs |", "|---|---:|---:|---:|---|---:|"]
    for row in one["results"]:
        numbers = " | ".join(f"{value:.3g}" for value in (row["median"], min(row["reps"]), max(row["reps"])))
        lines.append(f"| {row['name']} | {numbers} | {row['unit']} | {len(row['reps'])} |")
    return lines


if __name__ == "__main__":
    main()
