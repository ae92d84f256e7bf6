"""The quick list of installed packages, against the standard library's."""

import importlib.metadata

import pytest

from nemo_rl_lite.host.distributions import listed_quickly, packages_distributions


def test_everything_installed_here_is_listed_as_the_standard_library_lists_it():
    found, wanted = packages_distributions(), importlib.metadata.packages_distributions()
    assert found.keys() == wanted.keys()
    assert {name: sorted(owners) for name, owners in found.items()} == {
        name: sorted(owners) for name, owners in wanted.items()
    }


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Install a distribution of these files, given as lines of its RECORD; return what both lists say of it."""
    every = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: every(path=[str(tmp_path)]))

    def install(record, *there, top_level=None):
        info = tmp_path / "own_thing-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-thing\nVersion: 1.0\n")
        (info / "RECORD").write_text("\n".join(record))
        if top_level is not None:
            (info / "top_level.txt").write_text(top_level)
        for file in there:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        lists = packages_distributions(), importlib.metadata.packages_distributions()
        assert all(owners == ["own-thing"] for found in lists for owners in found.values())
        return [set(found) for found in lists]

    return install


def test_files_that_are_not_there_make_no_package(own):
    record = ["own_folder/a.py,sha256=x,3", "own_module.py,,", "own_lost.py,,", "own_lost_folder/a.py,,"]
    quick, standard = own(record, "own_folder/a.py", "own_module.py")
    assert quick == standard == {"own_folder", "own_module"}


def test_quoted_names_scripts_and_extensions(own):
    record = ['"own,folder/a.py",,', "../../bin/own,,", "own_native.cpython-312-x86_64-linux-gnu.so,,"]
    quick, standard = own(record, "own,folder/a.py", "own_native.cpython-312-x86_64-linux-gnu.so")
    assert quick == standard
    assert "own,folder" in quick


def test_a_declared_package_counts_whatever_its_files(own):
    quick, standard = own(["own_folder/a.py,,"], top_level="own_declared\n")
    assert quick == standard == {"own_declared"}


def test_the_standard_library_is_as_before_after_the_block():
    before = importlib.metadata.packages_distributions
    with pytest.raises(ImportError), listed_quickly():
        assert importlib.metadata.packages_distributions is packages_distributions
        raise ImportError
    assert importlib.metadata.packages_distributions is before
