"""The project's English: scripts/prose.py counts, and no count rises."""

import subprocess
import sys

from tests.unit.pages import ROOT


def test_no_count_has_risen():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "prose.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + "`scripts/prose.py FILE` lists the findings of a file"


def test_findings_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        f"# Title\n\nA step takes 1.1e+04 s. {'word ' * 26}\n\n| a | b |\n|---|---|\n| `x` | {'w ' * 30}|\n"
    )
    command = [sys.executable, str(ROOT / "scripts" / "prose.py"), str(page)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split(": ")[1] for line in found.splitlines()] == ["sentence", "words", "cell"]
