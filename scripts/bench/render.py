"""Render docs/benchmarks/*.json into docs/benchmarks/README.md and README.md. --check fails where one is stale."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record

PAGE = record.FOLDER / "README.md"
README = record.ROOT / "README.md"
# Tables of the README: the mark around it, the record, and the rows it shows (all where empty).
TABLES = {
    "quickstart table": ("quickstart", "cpu-2cores", ()),
    "gpu table": (
        "grpo-chain-sum",
        "1x-h100",
        (
            "mean reward of the last ten steps",
            "held-out accuracy before",
            "held-out accuracy after",
            "generate (median of a run)",
            "logprob (median of a run)",
            "train (median of a run)",
            "refit, engine awake again (median of a run)",
            "whole step (median of a run)",
        ),
    ),
}


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
    for mark, (bench, hardware, rows) in TABLES.items():
        one = next(one for one in records if (one["bench"], one["hardware"]["name"]) == (bench, hardware))
        before, rest = readme.split(f"<!-- {mark} -->\n")
        table = "\n".join(results_table(one, rows))
        readme = f"{before}<!-- {mark} -->\n{table}\n<!-- /{mark} -->{rest.split(f'<!-- /{mark} -->')[1]}"
    return {PAGE: "\n".join([*head, *(line for one in records for line in section(one))]), README: readme}


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


def results_table(one: dict[str, Any], names: Sequence[str] = ()) -> list[str]:
    """What was measured, a row a quantity; only those of `names` where it is given."""
    lines = ["| measured | median | least | most | unit | runs |", "|---|---:|---:|---:|---|---:|"]
    for row in one["results"]:
        if names and row["name"] not in names:
            continue
        numbers = " | ".join(f"{value:.3g}" for value in (row["median"], min(row["reps"]), max(row["reps"])))
        lines.append(f"| {row['name']} | {numbers} | {row['unit']} | {len(row['reps'])} |")
    return lines


if __name__ == "__main__":
    main()
