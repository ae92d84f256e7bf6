"""A user's function is found in its source, also where a module only imports it."""

import pytest

from nemo_rl_lite.rules import code

FILES = {
    "inner.py": "def kept(response, answer): ...\ndef hidden(response): ...\n",
    "outer.py": "from followed.inner import kept as renamed, hidden\nfrom followed.gone import absent\n"
    "from . import inner\nimport os\ntry:\n    from followed.inner import both\nexcept ImportError:\n"
    "    def both(response): ...\n",
    "again.py": "from followed.outer import renamed\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "followed").mkdir()
    for name, text in {"__init__.py": "", **FILES}.items():
        (tmp_path / "followed" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("inner.kept", ["response", "answer"]),
        ("outer.renamed", ["response", "answer"]),
        ("again.renamed", ["response", "answer"]),
        ("outer.both", None),
        ("outer.absent", None),
        ("outer.os", None),
        ("outer.inner", None),
    ],
)
def test_names_are_followed_to_their_definition(package, path, parameters):
    found = code.find(f"followed.{path}")
    assert not found.trouble
    assert (found.definition and code.parameters(found.definition)) == parameters
