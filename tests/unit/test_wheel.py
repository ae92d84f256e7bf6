"""The wheel, unpacked into a folder: what is in it, and its commands in an empty folder."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.unit.pages import ROOT

# Files of the checkout outside the package, and their place in the wheel.
BESIDE = {"configs": "configs", "recipes": "configs/recipes", "constraints.txt": "constraints.txt"}
BESIDE |= {"scripts/transformer_engine.sh": "scripts/transformer_engine.sh"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(unpacked: Path, empty: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "nemo_rl_lite.cli", *words]
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)


def test_every_file_of_the_package_is_in_it(unpacked):
    package = unpacked / "nemo_rl_lite"
    for source, place in (BESIDE | {"nemo_rl_lite": ""}).items():
        top = ROOT / source
        for file in [top] if top.is_file() else top.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                copy = package / place / (file.relative_to(top) if top.is_dir() else "")
                assert copy.read_bytes() == file.read_bytes(), file


DRY_RUN = ("train", "--dry-run", "recipes=grpo-tiny-1n0g-cpu")


@pytest.mark.parametrize("words", [DRY_RUN, ("slurm", "recipes=grpo-qwen3-8b-1n8g-tp2")], ids=lambda words: words[0])
def test_commands_work_in_an_empty_folder(unpacked, tmp_path, words):
    done = run(unpacked, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    # Which Python it is may be said.
    assert str(ROOT / "nemo_rl_lite") not in done.stdout + done.stderr


def test_the_constraints_are_printed_without_any_other_package(unpacked, tmp_path):
    command = [sys.executable, "-S", "-m", "nemo_rl_lite.cli", "constraints"]
    environment = {"PYTHONPATH": str(unpacked)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == unpacked / "nemo_rl_lite" / "constraints.txt"


def test_the_image_has_what_its_build_reads():
    """`pip install -e .` in the first stage, before the code is copied."""
    stage = (ROOT / "Dockerfile").read_text().partition('scripts/install.sh "${KIND}"')[0]
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", stage, re.M) for name in line.split()}
    copied |= set(re.findall(r"mkdir (\w+)", stage))
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    read = {"pyproject.toml", "README.md", hatch["version"]["path"]}
    assert read | hatch["build"]["targets"]["wheel"]["force-include"].keys() <= copied
    assert all((ROOT / name).exists() for name in copied)
