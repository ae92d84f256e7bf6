"""The console script: verbs, version, and the folder in which it finds a user's modules."""

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys

import pytest

from nemo_rl_lite import __version__, cli
from nemo_rl_lite.config.completion import script

BASH = shutil.which("bash")


@pytest.mark.parametrize("verb", cli.VERBS)
def test_a_verb_is_a_module(verb):
    assert importlib.util.find_spec(f"nemo_rl_lite.{verb}")


def test_a_verb_finds_the_modules_of_the_current_folder(tmp_path, monkeypatch):
    """A console script has the folder of the script on its path, and not the current one."""
    (tmp_path / "mine_alone.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [sys.prefix, *sys.path[1:]])
    monkeypatch.setattr(sys, "argv", ["nrl-lite", "train", "a=b"])
    assert importlib.util.find_spec("mine_alone") is None
    seen = []
    monkeypatch.setattr(runpy, "run_module", lambda name, run_name: seen.append((name, sys.argv)))
    cli.main()
    assert seen == [("nemo_rl_lite.train", ["nrl-lite train", "a=b"])] and importlib.util.find_spec("mine_alone")


def test_python_runs_the_package(tmp_path):
    command = [sys.executable, "-m", "nemo_rl_lite", "--version"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and __version__ in done.stdout


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_tab_completes():
    completed = {
        "nrl-lite ev": ["evaluate"],
        "nrl-lite train algorithm=dr": ["drgrpo"],
        "nrl-lite plan policy=megatron policy.precision=b": ["bfloat16"],
        "nrl-lite train checkpoint.save": ["checkpoint.save_period="],
        "nrl-lite report al": [],
    }
    commands = [script("bash", cli.VERBS)]
    for line in completed:
        # As bash does: words end at "=".
        words = line.replace("=", " = ").split()
        commands.append(f"COMP_LINE='{line}'; COMP_POINT={len(line)}; COMP_CWORD={len(words) - 1}")
        commands.append(f'COMP_WORDS=({" ".join(words)}); _nrl_lite; echo "${{COMPREPLY[*]}}"')
    done = subprocess.run([BASH, "-c", "\n".join(commands)], capture_output=True, text=True, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == list(completed.values())
