"""Measure a package's size, the files that one wrong key executes, and the private names of libraries that it uses.

Lines: all lines of the package's Python files; code lines leave out blank ones, comments and docstrings. Tests: all
lines of Python files of tests/.

One wrong key: files of which `nrl-lite train policy.lr=1e-4` executes a function, by a profile hook that is set before
the package is imported. The bodies of modules and classes do not count, functions called by them do.

Private accesses, outside of compat/, by the syntax tree: imports and attributes with a leading underscore that the file
does not define itself, and assignments to attributes of what it imports from libraries.
"""

import argparse
import ast
import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import record

# Documented, in spite of their names.
PUBLIC = {"os._exit", "sys._current_frames"}
PACKAGE, TESTS = record.ROOT / "nemo_rl_lite", record.ROOT / "tests"
WRONG_KEY = "policy.lr=1e-4"
LIMITS = {
    "package, lines": 30_500,
    "package, files": 200,
    "files executed by one wrong key": 15,
    "private accesses outside compat/": 0,
    "tests, lines": 28_000,
}
# Prints the files of the package whose functions run, whatever the command's end.
_PROFILED = """
import sys
package, files = sys.argv[1], set()
def note(frame, event, _):
    code = frame.f_code
    # Bodies of modules and classes have no fast locals. Generators in them and type parameters run with them.
    own = code.co_flags & 2 and not code.co_name.startswith("<generic") and code.co_qualname != "<genexpr>"
    if event == "call" and own and code.co_filename.startswith(package):
        files.add(code.co_filename)
sys.path.insert(0, package.rpartition("/nemo_rl_lite/")[0])
sys.setprofile(note)
try:
    from nemo_rl_lite.train import main
    main([sys.argv[2]])
except SystemExit:
    pass
sys.setprofile(None)
print(*sorted(files), sep="\\n")
"""


def main(arguments: list[str]) -> None:
    """Print the numbers and write the record. Exit status 2: the folder has no Python files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, nargs="?", default=PACKAGE, help="folder of the package (default: ours)")
    package = parser.parse_args(arguments).package.resolve()
    files, tests = sorted(package.rglob("*.py")), sorted(TESTS.rglob("*.py"))
    if not files:
        parser.error(f"{package} has no Python files")
    texts = {file: file.read_text() for file in files}
    outside = [file for file in files if file.relative_to(package).parts[0] != "compat"]
    private = [f"{file}:{found}" for file in outside for found in private_accesses(texts[file])]
    executed = executed_by_wrong_key(package)
    values = {
        "package, lines": sum(len(text.splitlines()) for text in texts.values()),
        "package, code lines": sum(code_lines(text) for text in texts.values()),
        "package, files": len(files),
        "files executed by one wrong key": len(executed),
        "private accesses outside compat/": len(private),
        "tests, lines": sum(len(file.read_text().splitlines()) for file in tests),
    }
    print(*executed, *private, *(f"{value:7} {name}" for name, value in values.items()), sep="\n")
    results = [record.result(name, "now", "", [value]) for name, value in values.items()]
    bars = [record.bar(name, values[name], limit, at_least=False) for name, limit in LIMITS.items()]
    print(record.write("house", results, bars))


def code_lines(text: str) -> int:
    """Return the number of lines that hold a token of code."""
    lines: set[int] = set()
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    # A docstring is a statement that is a string; the texts below attributes are docstrings, too.
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def executed_by_wrong_key(package: Path) -> list[str]:
    """Return the files of which the refused command executes a function."""
    command = [sys.executable, "-c", _PROFILED, f"{package}{os.sep}", WRONG_KEY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=record.ROOT)
    if "policy.lr" not in done.stderr:
        sys.exit(f"the command was not refused:\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if line.startswith(str(package))]


def private_accesses(source: str) -> Iterator[str]:
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


def trial() -> None:
    main([])


if __name__ == "__main__":
    record.start(main, trial)
