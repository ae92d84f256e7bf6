"""Every script of scripts/bench starts, and makes its records of what it tries on two cores."""

import importlib
import json
import os
import time
from pathlib import Path

import pytest

from tests.functional.ranks import run_script

pytestmark = pytest.mark.functional

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(file.stem for file in (ROOT / "scripts" / "bench").glob("*.py") if "def trial" in file.read_text())


class Waits:
    def go(self) -> None:
        time.sleep(120)


class Fails:
    def go(self) -> None:
        raise ValueError("the cause")


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The folder of the records of all trials. They run in one process, which shares imports and a small run."""
    folder = tmp_path_factory.mktemp("records")
    own = {"NRL_BENCH_OUT": str(folder), "NRL_BENCH_COMMIT": "trial", "TORCH_COMPILE_DISABLE": "1"}
    run_script(Path(__file__).with_name("bench_trials.py"), [folder, *SCRIPTS], os.environ | own, folder / "log", 900)
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_makes_its_record(name, out):
    assert (out / f"{name}.error").read_text() == ""


def test_records_have_results(out):
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


@pytest.mark.parametrize("arguments", [["--help"], ["no-such-folder"]])
def test_house_writes_no_record_without_a_package(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("NRL_BENCH_OUT", str(tmp_path))
    with pytest.raises(SystemExit):
        importlib.import_module("house").main(arguments)
    assert list(tmp_path.iterdir()) == []


def test_house_counts_lines_of_code():
    text = '"""Text."""\n\nx = 1  # why\n# alone\n"""Attribute."""\n\n\ndef f():\n    """D."""\n'
    assert importlib.import_module("house").code_lines(text) == 2
