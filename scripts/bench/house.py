"""Measure a package's size, the files that one wrong key executes, and the private names of libraries that it uses.

Lines: all lines of the package's Python files; code lines leave out blank ones, comments and docstrings. Tests: all
lines of Python files of tests/.

One wrong key: files of which `nrl-lite train policy.lr=1e-4` executes a function, by a profile hook that is set before
the package is imported. The bodies of modules and classes do not count, functions called by them do.

Private accesses, outside of compat/, by the syntax tree. A library is a top-level package that is imported and is
neither this package nor of the standard library. Counted are, in each file:
- an import of a module path or of a name with a part that begins with an underscore, from a library;
- an attribute with a leading underscore, at the end of or within a chain that begins at an imported name of a library
  (`torch._C._host_emptyCache`: one for the chain);
- an assignment to an attribute, or `setattr`, on such a chain: a patch of the library.
Names with two underscores on both sides (`__version__`) are public. An attribute of an instance that a library made is
not seen, because its type is not in the syntax.
"""

import argparse
import ast
import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import record

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
    private = [found for file in outside for found in private_accesses(file, texts[file])]
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


def private_accesses(file: Path, text: str) -> Iterator[str]:
    """Yield each private access of a file, with its line."""
    tree = ast.parse(text)
    of_libraries: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in filter(lambda one: _is_library(one.name), node.names):
                of_libraries.add(alias.asname or alias.name.partition(".")[0])
                if _is_private(alias.name.split(".")):
                    yield f"{file}:{node.lineno} import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_library(node.module or ""):
            for alias in node.names:
                of_libraries.add(alias.asname or alias.name)
                if _is_private([*(node.module or "").split("."), alias.name]):
                    yield f"{file}:{node.lineno} from {node.module} import {alias.name}"
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *parts = _chain(node)
            if root not in of_libraries:
                continue
            if isinstance(node.ctx, ast.Store | ast.Del):
                yield f"{file}:{node.lineno} {'.'.join((root, *parts))} is patched"
            elif id(node) not in inner and _is_private(parts):
                yield f"{file}:{node.lineno} {'.'.join((root, *parts))}"
        elif isinstance(node, ast.Call) and _chain(node.func) == ["setattr"]:
            roots = {_chain(one)[0] for one in node.args[:1]}
            yield from (f"{file}:{node.lineno} setattr on {root}" for root in roots & of_libraries)


def _is_library(module: str) -> bool:
    top = module.partition(".")[0]
    return bool(top) and top != "nemo_rl_lite" and top not in sys.stdlib_module_names


def _is_private(parts: Sequence[str]) -> bool:
    return any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in parts)


def _chain(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`; an empty first one where it does not begin at a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(parts)]


def trial() -> None:
    main([])


if __name__ == "__main__":
    record.start(main, trial)
