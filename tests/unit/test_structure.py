"""The package's imports against the table of rooms in docs/design.md: no arrow runs up, and there is no circle."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.unit.pages import DOCS, ROOT

PACKAGE = ROOT / "nemo_rl_lite"
VERBS = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__", "errors"}
# Every room may import these.
COMMON = {"errors", "__init__"}


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
    return {name: set(_imported(ast.parse(file.read_text()), known, package.name)) for name, file in known.items()}


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


def rooms_table(page: str) -> dict[str, set[str]]:
    """Room -> rooms it may import, in the table's order: from the top floor to the lowest."""
    section = page.partition("## Rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)/` \|.*\|([^|]*)\|$", section, re.MULTILINE)
    return {room: set(re.findall(r"`(\w+)`", allowed)) for room, allowed in rows}


def room_imports(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if room_of(module) not in VERBS | COMMON:
            others = {room_of(one) for one in imported} - {room_of(module)} - COMMON
            rooms.setdefault(room_of(module), set()).update(others)
    return rooms


GRAPH = imports(PACKAGE)
TABLE = rooms_table((DOCS / "design.md").read_text())


def upward(table: dict[str, set[str]]) -> list[str]:
    """The arrows of a table that run up, or to a room that it does not have."""
    floors = {room: floor for floor, room in enumerate(table)}
    return [
        f"{room} -> {other}"
        for room, allowed in table.items()
        for other in allowed
        if floors.get(other, -1) <= floors[room]
    ]


def test_no_arrow_of_the_table_runs_up():
    assert upward(TABLE) == []


def test_rooms_import_exactly_what_the_table_says():
    found = room_imports(GRAPH)
    assert {room: sorted(others) for room, others in found.items()} == {
        room: sorted(others) for room, others in TABLE.items()
    }


def test_no_room_imports_a_verb():
    assert [f"{module} -> {one}" for module, all_of_it in GRAPH.items() for one in all_of_it & VERBS] == []


def test_modules_import_each_other_in_no_circle():
    TopologicalSorter(GRAPH).prepare()


@pytest.mark.parametrize(
    ("files", "rooms", "circle"),
    [
        ({"low/a.py": "from house.high.b import f", "high/b.py": ""}, {"low": {"high"}, "high": set()}, False),
        (
            {"low/a.py": "", "high/b.py": "def g():\n    from house.low import a"},
            {"low": set(), "high": {"low"}},
            False,
        ),
        ({"low/a.py": "import house.low.b", "low/b.py": "from house.low.a import f"}, {"low": set()}, True),
    ],
    ids=["upward", "within a function", "circle"],
)
def test_what_the_checks_see(tmp_path, files, rooms, circle):
    for name, text in files.items():
        (tmp_path / "house" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "house" / name).write_text(text)
    graph = imports(tmp_path / "house")
    assert room_imports(graph) == rooms
    page = "## Rooms\n| room |\n| `high/` | the top | `low` |\n| `low/` | the ground | |\n## Next\n"
    assert upward(rooms_table(page)) == []
    assert upward({"high": {"low"}, "low": {"high"}}) == ["low -> high"]
    if circle:
        with pytest.raises(CycleError):
            TopologicalSorter(graph).prepare()
