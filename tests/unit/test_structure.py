"""The package's imports against the floors of docs/design.md: none runs up, and there is no circle."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.unit.pages import DOCS, ROOT

PACKAGE = ROOT / "nemo_rl_lite"
VERBS = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__", "__main__", "errors"}
# Every room may import these.
COMMON = {"errors", "__init__", "__main__"}


def modules(package: Path) -> dict[str, Path]:
    """Dotted name below the package -> file; a folder's `__init__` under the folder's name."""
    names = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package).with_suffix("").parts
        names[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = file
    return names


def imports(package: Path) -> dict[str, set[str]]:
    """Each module and the package's modules that it imports, wherever in its code it does so."""
    known = modules(package)
    graph = {name: set(_imported(ast.parse(file.read_text()), known, package.name)) for name, file in known.items()}
    # The package itself imports its Python API only once somebody uses that.
    return graph | {"__init__": set()}


def _imported(tree: ast.AST, known: dict[str, Path], package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            base = (node.module or "").partition(".")[2]
            for alias in node.names:
                name = f"{base}.{alias.name}".removeprefix(".")
                yield name if name in known else base or "__init__"
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.startswith(f"{package}."))


def room_of(module: str) -> str:
    return module.partition(".")[0]


def floors(page: str) -> list[str]:
    """Return the rooms from the top floor to the lowest."""
    block = page.partition("## Packages")[2].partition("```text\n")[2].partition("```")[0]
    return re.findall(r"\w+", block)


def room_imports(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if room_of(module) not in VERBS | COMMON:
            others = {room_of(one) for one in imported} - {room_of(module)} - COMMON
            rooms.setdefault(room_of(module), set()).update(others)
    return rooms


GRAPH = imports(PACKAGE)
PAGE = (DOCS / "design.md").read_text()
FLOORS = floors(PAGE)


def upward(graph: dict[str, set[str]], order: list[str]) -> list[str]:
    """Return the imports that run up the floors, or to a room that has none."""
    place = {room: floor for floor, room in enumerate(order)}
    rooms = room_imports(graph).items()
    return [f"{a} -> {b}" for a, others in rooms for b in others if place.get(b, -1) <= place[a]]


def test_rooms_import_only_rooms_below_them():
    assert upward(GRAPH, FLOORS) == []


def test_the_page_describes_every_room():
    described = re.findall(r"^\|[^|]*\| `(\w+)/` \|", PAGE, re.MULTILINE)
    assert sorted(described) == sorted(FLOORS) == sorted(room_imports(GRAPH))


def test_no_room_imports_a_verb():
    assert [
        f"{module} -> {one}" for module, all_of_it in GRAPH.items() for one in all_of_it & VERBS if module != "__main__"
    ] == []


def test_modules_import_each_other_in_no_circle():
    TopologicalSorter(GRAPH).prepare()


@pytest.mark.parametrize(
    ("files", "up", "circle"),
    [
        ({"low/a.py": "from house.high.b import f", "high/b.py": ""}, ["low -> high"], False),
        ({"low/a.py": "", "high/b.py": "def g():\n    from house.low import a"}, [], False),
        ({"low/a.py": "import house.low.b", "low/b.py": "from house.low.a import f"}, [], True),
    ],
    ids=["upward", "within a function", "circle"],
)
def test_what_the_checks_see(tmp_path, files, up, circle):
    for name, text in files.items():
        (tmp_path / "house" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "house" / name).write_text(text)
    graph = imports(tmp_path / "house")
    assert upward(graph, floors("## Packages\n```text\nhigh > low\n```\n")) == up
    if circle:
        with pytest.raises(CycleError):
            TopologicalSorter(graph).prepare()
