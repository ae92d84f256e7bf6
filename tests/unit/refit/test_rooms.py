"""The arrows between the rooms of refit/ run down: engine -> transport -> layout."""

from tests.unit.pages import DOCS
from tests.unit.test_structure import GRAPH

ORDER = ["engine", "transport", "layout"]


def test_no_arrow_runs_up():
    arrows = {
        (module.split(".")[1], one.split(".")[1])
        for module, imported in GRAPH.items()
        for one in imported
        if module.startswith("refit.") and one.startswith("refit.")
    }
    assert {("engine", "transport"), ("transport", "layout")} <= arrows
    assert [(room, other) for room, other in arrows if ORDER.index(room) > ORDER.index(other)] == []


def test_the_table_of_rooms_gives_this_order():
    (row,) = [line for line in (DOCS / "design.md").read_text().splitlines() if line.startswith("| `refit/` |")]
    assert [row.index(f"`{room}/`") for room in ORDER] == sorted(row.index(f"`{room}/`") for room in ORDER)
