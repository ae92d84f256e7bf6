import sys

import pytest

from nemo_rl_lite.host.lazy_package import import_all, import_lazily, modules_with

FILES = {
    "__init__.py": """'''A package.'''
import {name}.heavy
from . import light
from .light import half as part
from .heavy import whole

__all__ = ["part", "whole"]
SIZE = 3
""",
    "light.py": 'half = 1\nregister_as = "lamp"\n',
    "heavy.py": "whole = 2\n",
}


@pytest.fixture
def package(request, tmp_path, monkeypatch):
    """A package that nobody has imported yet."""
    name = f"lazy_{abs(hash(request.node.nodeid))}"
    (tmp_path / name).mkdir()
    for file, text in FILES.items():
        (tmp_path / name / file).write_text(text.format(name=name) if file == "__init__.py" else text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


def imported(package: str) -> list[str]:
    return sorted(module.partition(".")[2] for module in sys.modules if module.startswith(f"{package}."))


def test_a_name_is_imported_when_it_is_asked_for(package):
    import_lazily(package)
    module = sys.modules[package]
    assert imported(package) == [] and module.SIZE == 3 and module.__all__ == ["part", "whole"]
    assert module.part == 1 and imported(package) == ["light"]
    assert module.light.half == 1 and imported(package) == ["light"]
    assert module.whole == 2 and imported(package) == ["heavy", "light"]
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = module.other


def test_all_of_it_can_be_imported_and_a_second_time_does_nothing(package):
    import_all(package)
    first = sys.modules[package]
    import_lazily(package)
    assert imported(package) == ["heavy", "light"] and sys.modules[package] is first


@pytest.mark.parametrize("line", ["print()", "SIZE = max(1, 2)", "if True: SIZE = 4", "from .heavy import *"])
def test_a_package_that_does_more_is_imported_as_python_does(package, line, tmp_path):
    init = tmp_path / package / "__init__.py"
    init.write_text(init.read_text() + line)
    import_lazily(package)
    assert imported(package) == ["heavy", "light"]


def test_modules_are_found_by_their_text_without_an_import(package):
    assert modules_with(package, r"register_as = .lamp\b") == [f"{package}.light"]
    assert modules_with(package, r"register_as = .table") == [] and imported(package) == []
    with pytest.raises(ImportError):
        import_lazily(f"{package}_that_is_not_there")
