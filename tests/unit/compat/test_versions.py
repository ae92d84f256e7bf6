"""After an upgrade: all couplings to recheck, in one failure. No library is imported."""

import ast
import logging
import re
import sys

import pytest

from nemo_rl_lite.compat import versions
from tests.unit.pages import ROOT

ROOM = ROOT / "nemo_rl_lite/compat"
# They couple nothing.
OWN = {"__init__", "versions"}
MODULES = sorted(file for file in ROOM.glob("*.py") if file.stem not in OWN)


def declared(tree: ast.Module) -> list[tuple[str, ...]]:
    """Return, for each of a module's calls of `written_for`, the library and its releases."""
    assigned = [one for one in tree.body if isinstance(one, ast.Assign)]
    names = {one.targets[0].id: one.value for one in assigned if isinstance(one.targets[0], ast.Name)}
    calls = [one.value for one in tree.body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)]
    given = [call.args[1:] for call in calls if ast.unparse(call.func) == "written_for"]
    return [tuple((names[one.id] if isinstance(one, ast.Name) else one).value for one in args) for args in given]


def imported(tree: ast.Module) -> set[str]:
    """Return the names of the packages that a module imports."""
    names = [one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module]
    names += [alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names]
    return {name.partition(".")[0] for name in names}


def couplings(tree: ast.Module) -> list[str]:
    """Return the public functions and classes of a module, with the first line of each, and private names of others."""
    found = [one for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)]
    public = [one for one in found if not one.name.startswith("_")]
    listed = [f"{one.name}: {(ast.get_docstring(one) or '').partition(chr(10))[0]}" for one in public]
    others = (ast.unparse(one) for one in tree.body if isinstance(one, ast.ImportFrom | ast.Assign))
    return listed + [f"names: {one}" for one in others if re.search(r"(\.|import )_[a-z]", one)]


def pinned(library: str) -> str:
    """Return the version that scripts/install.sh installs."""
    (found,) = re.findall(rf"^{library}==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return found


def test_every_version_is_the_one_that_couplings_were_written_for():
    recheck = []
    for file in MODULES:
        tree = ast.parse(file.read_text())
        assert declared(tree) or imported(tree) <= sys.stdlib_module_names, f"compat/{file.name} declares no release"
        for library, *releases in declared(tree):
            for version in {pinned(library), versions.installed(library)} - {None}:
                if not any(f"{version}.".startswith(f"{release}.") for release in releases):
                    listed = "".join(f"\n    {one}" for one in couplings(tree))
                    recheck.append(f"compat/{file.name} was written for {library} {releases}, not {version}{listed}")
    assert not recheck, "recheck, then change the release in written_for:\n" + "\n".join(recheck)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.stem)
def test_the_list_says_what_each_coupling_is_for(file):
    assert all(re.fullmatch(r"\w+: .+", one) for one in couplings(ast.parse(file.read_text())))


@pytest.mark.parametrize(
    ("version", "releases", "warns"),
    [
        ("2.56.1", ["2.56"], False),
        ("2.57.0", ["2.56"], True),
        ("2.5", ["2.56"], True),
        ("2.11.0+cpu", ["2.11"], False),
        ("0.31.0", ["0.26", "0.31"], False),
        ("0.27.0", ["0.26", "0.31"], True),
    ],
)
def test_a_run_goes_on_with_a_warning_that_names_the_module(monkeypatch, caplog, version, releases, warns):
    monkeypatch.setattr(versions, "version", lambda _: version)
    with caplog.at_level(logging.WARNING):
        versions.written_for("compat.some", "some", *releases)
    named = " and ".join(releases)
    assert caplog.messages == ([f"compat.some was written for some {named}, and {version} is installed"] * warns)


@pytest.mark.parametrize(
    ("version", "found"),
    [("0.30.9", False), ("0.31.0rc1", True), ("0.31.2+cu130", True), ("0.100.0", True), ("1.0", True)],
)
def test_a_later_release_counts_as_since(monkeypatch, version, found):
    monkeypatch.setattr(versions, "version", lambda _: version)
    assert versions.since("some", "0.31") is found


def test_a_library_that_is_not_installed_needs_no_warning(caplog):
    versions.written_for("compat.some", "no-such-library", "1")
    assert not caplog.messages and versions.installed("no-such-library") is None
