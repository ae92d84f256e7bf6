"""Private names of libraries, and patches of them, are in `compat/` alone."""

import ast
import sys
from collections.abc import Iterator

import pytest

from tests.unit.pages import ROOT

PACKAGE = ROOT / "nemo_rl_lite"
# Documented, in spite of their names.
PUBLIC = {"os._exit", "sys._current_frames"}


def outside(source: str) -> Iterator[str]:
    """Yield the private accesses and patches of libraries in a module, with their lines."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    own, libraries = set(_own(nodes)), set(_libraries(nodes))
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and ast.unparse(node) not in PUBLIC:
            on_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not on_itself and node.attr not in own:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("nemo_rl_lite"):
            names = [*(node.module or "").split("."), *(one.name for one in node.names)]
            yield from (f"{node.lineno}: {ast.unparse(node)}" for name in names if _is_private(name))
        for target in _assigned(node):
            root = ast.unparse(target).split(".")[0].split("[")[0]
            name = ast.unparse(target)
            # The main module is no library.
            if root in libraries or (name.startswith("sys.modules") and name != "sys.modules['__main__']"):
                yield f"{node.lineno}: {name} is assigned"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own(nodes: list[ast.AST]) -> Iterator[str]:
    """Names that the module itself defines."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def _libraries(nodes: list[ast.AST]) -> Iterator[str]:
    """Names of imported modules, classes and functions of libraries."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for one in node.names:
                top = ((node.module or "") if isinstance(node, ast.ImportFrom) else one.name).partition(".")[0]
                if top not in sys.stdlib_module_names | {"nemo_rl_lite"}:
                    yield one.asname or one.name.partition(".")[0]


def _assigned(node: ast.AST) -> Iterator[ast.expr]:
    """The attributes and items that a statement sets."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
        targets = [ast.Attribute(node.args[0], "any", ast.Store())]
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        yield from (one for one in parts if isinstance(one, ast.Attribute | ast.Subscript))


def test_there_are_none_outside_compat():
    files = [file for file in PACKAGE.rglob("*.py") if file.parent.name != "compat"]
    assert [f"{file.relative_to(ROOT)}:{one}" for file in files for one in outside(file.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import ray\nray._private.worker",
        "from hydra._internal.utils import run",
        "from transformers.utils import _compile",
        "def f(self):\n    return self.engine._core",
        "import torch\ntorch.cuda.sync = None",
        "def f():\n    from te import attention\n    setattr(attention, 'reorder', 1)",
        "import sys\nsys.modules['wandb'] = None",
    ],
)
def test_what_is_found(source):
    assert len(list(outside(source))) >= 1


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        return self._x",
        "from nemo_rl_lite.a import _b",
        "import os\nos._exit(1)\nos.environ['a'] = 'b'",
        "import sys\nsys.modules['__main__'] = module",
    ],
)
def test_what_is_not(source):
    assert list(outside(source)) == []
