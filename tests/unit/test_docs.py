"""The documents say what is true now."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_rendered_tables_are_up_to_date():
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "render.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_commands_of_the_readme_are_valid():
    """Each example on the README's command lines composes, but for those with files of the reader's own."""
    from nemo_rl_lite.config.compose import compose_config

    examples = re.findall(
        r"^    python -m nemo_rl_lite\.train(.*?)(?:\s{2,}#.*)?$", (ROOT / "README.md").read_text(), re.M
    )
    checked = 0
    for example in examples:
        words = example.split()
        if any(word.startswith("-") for word in words) or "\\" in words:
            continue
        compose_config(words)
        checked += 1
    assert checked >= 4
