"""Every script of scripts/bench starts, and makes its records of what it tries on two cores."""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import pytest
from torch import distributed

pytestmark = pytest.mark.functional

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(file.stem for file in (ROOT / "scripts" / "bench").glob("*.py") if "def trial" in file.read_text())


class Waits:
    def go(self) -> None:
        time.sleep(120)


class Fails:
    def go(self) -> None:
        raise ValueError("the cause")


@pytest.fixture(scope="module", autouse=True)
def out(tmp_path_factory):
    """A folder for records, for all trials, which share one small run."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("records")
        patch.setenv("NRL_BENCH_OUT", str(folder))
        patch.setenv("NRL_BENCH_COMMIT", "trial")
        patch.syspath_prepend(str(ROOT / "scripts" / "bench"))
        patch.setattr(sys, "argv", ["--trial"])
        patch.setattr(os, "environ", os.environ)
        yield folder
    # A trial may train in this process.
    if distributed.is_initialized():
        from nemo_rl_lite.policy.model import leave_groups

        leave_groups()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_makes_its_record(name, out):
    importlib.import_module(name).trial()
    for file in out.glob("*.json"):
        found = json.loads(file.read_text())
        assert found.get("results") or "series" in found, file


def test_every_script_that_is_a_command_has_a_trial():
    commands = {file.stem for file in (ROOT / "scripts" / "bench").glob("*.py") if "def main(" in file.read_text()}
    assert commands == set(SCRIPTS)


def test_an_engines_error_does_not_wait_for_the_policy(monkeypatch):
    refit = importlib.import_module("refit")
    monkeypatch.setattr(refit, "SIDES", (Waits, Fails))
    pair = refit.Pair(shared=False)
    pair.both("make")
    began = time.monotonic()
    with pytest.raises(SystemExit, match=r"Fails\.go: ValueError: the cause"):
        pair.both("go")
    assert time.monotonic() - began < 60


def test_house_finds_private_accesses_and_patches_of_libraries(tmp_path):
    house, file = importlib.import_module("house"), tmp_path / "module.py"
    text = (
        "import os\nimport torch\nfrom ray._private import node\nfrom nemo_rl_lite.errors import _x\n"
        "os._exit\ntorch.__version__\ntorch._C._host_emptyCache()\ntorch.foo.bar = 1\nself._own = torch.cat\n"
        "setattr(torch.cuda, 'a', 1)\n"
    )
    found = [one.partition(":")[2] for one in house.private_accesses(file, text)]
    assert found == [
        "3 from ray._private import node",
        "8 torch.foo.bar is patched",
        "10 setattr on torch",
        "7 torch._C._host_emptyCache",
    ]
    assert house.code_lines('"""Text."""\n\nx = 1  # why\n# alone\n"""Attribute."""\n\n\ndef f():\n    """D."""\n') == 2
