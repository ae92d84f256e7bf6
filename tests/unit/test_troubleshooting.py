"""docs/troubleshooting.md names keys and statuses that exist."""

import re
from pathlib import Path

from nemo_rl_lite.config.keys import is_open, known_keys
from nemo_rl_lite.errors import RunStopped

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
SECTIONS = "algorithm|policy|generation|offload|refit|data|reward|environment|cluster|logger|checkpoint"


def test_keys_exist():
    named = set(re.findall(rf"\b((?:{SECTIONS})\.[a-z_]\w*(?:\.[a-z_]\w*)*)", "\n".join(re.findall("`[^`\n]+`", PAGE))))
    keys = set(known_keys())
    assert len(named) > 20
    files = {name for name in named if name.endswith((".md", ".txt", ".jsonl", ".log", ".json", ".sh"))}
    assert {name for name in named - files if name not in keys and not is_open(name)} == set()


def test_statuses_are_the_launchers():
    assert f"| {RunStopped.exit_status} | stopped early" in PAGE
