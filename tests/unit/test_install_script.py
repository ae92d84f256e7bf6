"""install.sh's answers to what a new machine may lack. Nothing is installed here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ["bash", "cat", "sha256sum", "cut", "flock", "rm", "df", "awk", "du", "sleep", "kill", "dirname", "grep"]
TOOLS += ["tail", "wc"]

# pip's settings for a machine without network.
NOWHERE = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_RETRIES": "0",
}


@pytest.fixture
def machine(tmp_path):
    """A folder with what install.sh reads, and a PATH with only the tools it uses."""
    checkout, tools = tmp_path / "checkout", tmp_path / "tools"
    (checkout / "scripts").mkdir(parents=True)
    tools.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "scripts/install.sh"):
        shutil.copy(ROOT / name, checkout / name)
    for tool in TOOLS:
        found = shutil.which(tool)
        if found:
            (tools / tool).symlink_to(found)
    return checkout, tools


def install(machine, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    checkout, tools = machine
    own = {"PATH": str(tools), "HOME": str(checkout.parent), "PYENV_ROOT": str(checkout.parent / "no-pyenv")}
    command = ["bash", "scripts/install.sh", *arguments]
    return subprocess.run(
        command, cwd=checkout, env=own | environment, capture_output=True, text=True, check=False, timeout=600
    )


def test_without_network_it_says_so_and_the_next_run_tries_again(machine):
    """Python 3.12 is also found in pyenv."""
    checkout, _ = machine
    versions = checkout.parent / "pyenv" / "versions" / "3.12.9" / "bin"
    versions.mkdir(parents=True)
    (versions / "python3.12").symlink_to(sys.executable)
    done = install(machine, "cpu", PYENV_ROOT=str(checkout.parent / "pyenv"), **NOWHERE)
    assert done.returncode == 1 and (checkout / ".venv" / "bin" / "python").exists()
    assert "packages could not be fetched: is the package index reachable" in done.stderr
    assert not (checkout / ".venv" / "installed").exists()


def test_an_unknown_kind_of_machine_is_refused(machine):
    done = install(machine, "tpu")
    assert done.returncode == 1 and "usage: bash scripts/install.sh [cpu|gpu]" in done.stderr


def test_an_up_to_date_environment_is_left_alone(machine):
    checkout, tools = machine
    (tools / "python3.12").symlink_to(sys.executable)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    content = b"".join(
        (checkout / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "scripts/install.sh")
    )
    digest = subprocess.run(["sha256sum"], input=content, capture_output=True, check=True).stdout.split()[0].decode()
    (checkout / ".venv" / "installed").write_text(f"cpu {checkout} {digest}\n")
    done = install(machine, "cpu")
    assert done.returncode == 0 and "up to date (cpu)" in done.stdout
