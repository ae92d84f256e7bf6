"""What a configuration names is imported by dotted path or from a file, here and in other processes."""

import pickle
import subprocess
import sys

import pytest

from nemo_rl_lite.config.user_code import file_of, imported, own_name

FILE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Pair:
    left: "int"

def score(response, answer):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a dot and a space in its name, and a file that has the name of a module of Python."""
    place = tmp_path / "my code.d"
    place.mkdir()
    (place / "json.py").write_text(FILE)
    monkeypatch.chdir(place)
    return place


def test_a_path_is_a_module_or_a_file():
    assert imported("nemo_rl_lite.rewards.builtin.exact_match")(" a", "a") == 1.0
    assert file_of("package.module.name") is None and own_name("package.module.name") == "name"
    assert file_of("/there/my.py:name").as_posix() == "/there/my.py" and own_name("/there/my.py:name") == "name"
    assert file_of("~/my.py:name").is_absolute()


def test_a_file_is_imported_once_and_shadows_nothing(folder):
    assert imported("json.py:score")("", "") == 1.0
    assert imported(f"{folder}/json.py:Pair") is imported("./json.py:Pair") or imported("json.py:Pair")
    assert imported("json.py:Pair") is imported(f"{folder}/json.py:Pair")
    import json

    assert "my code.d" not in json.__file__


def test_its_objects_are_pickled_for_other_processes(folder):
    pair = imported("json.py:Pair")(3)
    assert pickle.loads(pickle.dumps(pair)) == pair
    # A process in another folder that has imported nothing of the package.
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).left)"
    command = [sys.executable, "-c", code, pickle.dumps(pair).hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.stdout == "3\n", done.stderr
    (folder / "json.py").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert f"there is no file {folder}/json.py on " in done.stderr


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("json.py:scores", "json.py has no scores"),
        ("gone.py:score", "there is no file .*gone.py on .*every machine"),
        ("nemo_rl_lite.rewards.builtin.exact", "nemo_rl_lite.rewards.builtin has no exact"),
    ],
)
def test_what_is_not_there_is_named(folder, path, told):
    with pytest.raises(ImportError, match=told):
        imported(path)
