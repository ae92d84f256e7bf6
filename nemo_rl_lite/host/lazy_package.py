"""Import a package without everything that its `__init__.py` imports, which for some is hundreds of modules."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package that imports a module when the first of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        source = vars(self)["_sources"].get(name)
        if source is None:
            # Python then looks for a module of this name in the package.
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, own_name = source
        # As `from module import name` finds it: among the module's names, or as a module below it.
        found = None if module == self.__name__ else importlib.import_module(module)
        if hasattr(found, own_name):
            value = getattr(found, own_name)
        else:
            value = importlib.import_module(f"{module}.{own_name}")
        setattr(self, name, value)
        return value


def import_lazily(package: str) -> None:
    """Import a package whose `__init__.py` only imports and sets constants such that each of its names is imported when
    it is asked for. Import any other package, and one that a lazy one cannot stand for, as Python does.

    Raises:
        ImportError: there is no such package.
    """
    if package in sys.modules:
        return
    spec = find_spec(package)
    statements = _statements(spec.origin if spec is not None else None)
    if spec is None or statements is None:
        importlib.import_module(package)
        return
    module = module_from_spec(spec)
    module.__class__ = _LazyPackage
    vars(module)["_sources"] = dict(_sources(package, statements))
    constants = [one for one in statements if not isinstance(one, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(constants, []), str(spec.origin), "exec"), vars(module))  # noqa: S102 (the package's own)
    sys.modules[package] = module
    parent, _, own_name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own_name, module)


def modules_with(package: str, pattern: str) -> list[str]:
    """Return the modules below an installed package, as dotted paths, in whose sources a regular expression is found.
    None of them is imported."""
    spec, wanted = find_spec(package), re.compile(pattern)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    files = [(file, folder) for folder in folders for file in sorted(folder.rglob("*.py"))]
    found = [file.relative_to(folder) for file, folder in files if wanted.search(file.read_text(errors="replace"))]
    return [".".join((package, *file.with_suffix("").parts)) for file in found]


def import_all(package: str) -> None:
    """Import everything that a package's `__init__.py` imports, as an import that is not lazy does."""
    import_lazily(package)
    for name in vars(sys.modules[package]).get("_sources", ()):
        getattr(sys.modules[package], name)


def _statements(file: str | None) -> list[ast.stmt] | None:
    """The statements of an `__init__.py`; None where some do more than to import names and set constants."""
    if file is None or not file.endswith(".py"):
        return None
    statements = ast.parse(Path(file).read_bytes()).body
    return statements if all(map(_is_simple, statements)) else None


def _is_simple(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return all(name.name != "*" for name in statement.names)
    if isinstance(statement, ast.Assign | ast.Expr):
        try:
            ast.literal_eval(statement.value)
        except ValueError:
            return False
        return True
    return isinstance(statement, ast.Import)


def _sources(package: str, statements: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each name that the statements import, with the module and the name in it."""
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            module = resolve_name(f"{'.' * statement.level}{statement.module or ''}", package)
            for name in statement.names:
                yield name.asname or name.name, (module, name.name)
