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


def give_python(machine) -> None:
    _, tools = machine
    (tools / "python3.12").symlink_to(sys.executable)


def test_without_python_312_it_says_how_to_get_it(machine):
    done = install(machine)
    assert done.returncode == 1
    assert "Python 3.12 is needed" in done.stderr and "pyenv install 3.12" in done.stderr


def test_without_space_it_says_how_much(machine):
    give_python(machine)
    _, tools = machine
    (tools / "df").unlink()
    (tools / "df").write_text("#!/bin/sh\necho head; echo disk 100 99 1024 99% /\n")
    (tools / "df").chmod(0o755)
    done = install(machine, "cpu")
    assert done.returncode == 1
    assert "9 GiB of free disk space are needed here" in done.stderr


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
    give_python(machine)
    checkout, _ = machine
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    content = b"".join(
        (checkout / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "scripts/install.sh")
    )
    digest = subprocess.run(["sha256sum"], input=content, capture_output=True, check=True).stdout.split()[0].decode()
    (checkout / ".venv" / "installed").write_text(f"cpu {checkout} {digest}\n")
    done = install(machine, "cpu")
    assert done.returncode == 0 and "up to date (cpu)" in done.stdout


FAKE_PYTHON = """#!/bin/bash
echo "$@" >>{log}
case "$*" in
  *"pip wheel"*)
    while [[ $1 != --wheel-dir ]]; do shift; done
    echo "  [1/2] c++ one"; echo "  [2/2] c++ two"
    echo wheel >"$2/transformer_engine_torch-{version}-cp312-cp312-linux_x86_64.whl" ;;
esac
"""


def test_what_is_compiled_is_compiled_once(tmp_path):
    """The part of Transformer Engine without a wheel; the second install takes what the first one kept."""
    constraints = (ROOT / "constraints.txt").read_text()
    version = next(line for line in constraints.splitlines() if line.startswith("transformer-engine-torch==")).split(
        "=="
    )[1]
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(FAKE_PYTHON.format(log=log, version=version))
    python.chmod(0o755)
    calls = []
    for _ in range(2):
        log.write_text("")
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = ["bash", str(ROOT / "scripts" / "transformer_engine.sh"), str(python)]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        calls.append(log.read_text())
    first, second = calls
    assert "pip wheel" in first and "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl" in first
    assert "pip wheel" not in second and f"transformer_engine_torch-{version}-cp312" in second
    assert [line for line in first.splitlines() if "pip install" in line][-1] == second.strip()
    for needed in (
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-cuda-cccl",
        "setuptools",
        "wheel",
        "packaging",
        "ninja",
    ):
        assert f"\n{needed}==" in constraints, needed


def test_without_a_compiler_gpus_are_told_before_anything_is_fetched(machine):
    give_python(machine)
    done = install(machine, "gpu", **NOWHERE)
    assert done.returncode == 1 and "needs a C++ compiler (c++)" in done.stderr and "python3.12-dev" in done.stderr
    assert "set-up into .venv" not in done.stdout
