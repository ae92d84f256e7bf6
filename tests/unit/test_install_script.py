"""install.sh's answers to what a new machine may lack. Nothing is installed here."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ["bash", "cat", "sha256sum", "cut", "flock", "rm", "df", "awk", "du", "sleep", "kill", "dirname", "grep"]
TOOLS += ["tail", "wc"]


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
