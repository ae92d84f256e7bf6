"""The manual names the attacks on the sandbox that are not contained."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_manual_names_every_attack_that_is_not_contained():
    record = json.loads((ROOT / "docs" / "benchmarks" / "sandbox-cpu.json").read_text())
    page = (ROOT / "docs" / "sandbox.md").read_text().partition("## Secrets")[0]
    tables = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    open_ = {one["name"] for one in record["attacks"] if not one["namespaces"]["contained"]}
    elsewhere = {one["name"] for one in record["attacks"] if not one["no namespaces"]["contained"]}
    assert len(record["attacks"]) >= 50 and f" {len(record['attacks'])} attacks" in page
    assert not {name for name in open_ | elsewhere if not any(name in row for row in tables)}
