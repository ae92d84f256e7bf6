"""Looks at a user's function or class in its source file, without importing it: what it imports may take long."""

import ast
import difflib
import importlib.util
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.user_code import file_of, own_name

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_KINDS = inspect.Parameter


@dataclass(frozen=True)
class Found:
    """What a path leads to: `trouble` says why it cannot be used, and `definition` is its source where it is
    known (None: it is imported there, or computed)."""

    trouble: str = ""
    definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None = None


# Modules that import a name from each other are followed so far.
_FOLLOWED = 3


def find(path: str, follow: int = _FOLLOWED) -> Found:
    """Find `package.module.name` or `path/to/file.py:name`, there or in the modules that it comes from. The packages
    around a module are imported; the module or the file is not."""
    file, name = file_of(path), own_name(path)
    if file is None:
        module = path.rpartition(".")[0]
        try:
            spec = importlib.util.find_spec(module) if module else None
        except (Exception, SystemExit) as error:  # a user's package may raise anything while it is imported
            return Found(f"cannot be imported: {type(error).__name__}: {error}")
        if spec is None:
            return Found(f"there is no module {module or path} on the path that Python searches")
        if spec.origin is None or not spec.origin.endswith(".py"):
            return Found()
        file = Path(spec.origin)
    elif not file.is_file():
        return Found(f"there is no file {file}")
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        return Found(f"cannot be imported: {file}, line {error.lineno}: {error.msg}")
    except (OSError, ValueError) as error:
        return Found(f"cannot be read: {error}")
    names = _names(tree)
    if name not in names and "*" not in names and "__getattr__" not in names:
        close = difflib.get_close_matches(name, names, n=1)
        return Found(f"{file} has no {name}" + (f"; did you mean {close[0]}?" if close else ""))
    definition = names.get(name)
    if isinstance(definition, str) and follow:
        there = find(definition, follow - 1)
        # What cannot be followed may still be there.
        return Found() if there.trouble else there
    # A decorator may change what it decorates into anything.
    is_known = isinstance(definition, _DEFINITIONS) and not definition.decorator_list
    return Found(definition=definition) if is_known else Found()


def misfit(definition: ast.FunctionDef | ast.AsyncFunctionDef, positional: int, keywords: Mapping[str, Any]) -> str:
    """Why a function cannot be called with N positional arguments and these keywords; empty where it can."""
    try:
        _signature(definition).bind(*range(positional), **keywords)
    except TypeError as error:
        return str(error)
    return ""


def parameters(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of a function's parameters."""
    return list(_signature(definition).parameters)


def fields(package: str, file: str, name: str) -> dict[str, str]:
    """The annotated fields of class `name` in `file` of an installed package, which is not imported, each with its
    annotation; empty where they cannot be found."""
    spec = importlib.util.find_spec(package)
    try:
        tree = ast.parse((Path(spec.origin).parent / file).read_bytes()) if spec and spec.origin else ast.Module([], [])
    except (OSError, ValueError, SyntaxError):
        return {}
    found = _names(tree).get(name)
    body = found.body if isinstance(found, ast.ClassDef) else []
    annotated = [one for one in body if isinstance(one, ast.AnnAssign)]
    return {one.target.id: ast.unparse(one.annotation) for one in annotated if isinstance(one.target, ast.Name)}


def members(definition: ast.ClassDef) -> dict[str, Any]:
    """The names that a class defines itself, each with its definition where that is one."""
    return _names(definition)


def uncallable(method: ast.FunctionDef | ast.AsyncFunctionDef, positional: int) -> str:
    """Why a method cannot be called on an object with N positional arguments; empty where it can."""
    decorators = [ast.unparse(one) for one in method.decorator_list]
    if decorators not in ([], ["staticmethod"], ["classmethod"]):
        # A decorator may change what it decorates into anything.
        return ""
    return misfit(method, positional + (decorators != ["staticmethod"]), {})


def as_dotted(path: str) -> str:
    """The dotted path that `package.module:name` stands for; empty for other texts."""
    found = re.fullmatch(r"(\w+(?:\.\w+)*):(\w+)", path)
    return f"{found[1]}.{found[2]}" if found and file_of(path) is None else ""


def _names(tree: ast.Module | ast.ClassDef) -> dict[str, Any]:
    """The names that a module or a class defines outside functions, each with its definition where that is one, or with
    the dotted path that it is imported from."""
    found: dict[str, Any] = {}
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, _DEFINITIONS):
            # The last statements come first here, and a name means its last definition.
            found.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                name = one.asname or one.name
                found[name] = None if name in found else f"{node.module}.{one.name}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= dict.fromkeys(one.asname or one.name.split(".")[0] for one in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
        else:
            waiting += ast.iter_child_nodes(node)
    return found


def _signature(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    own = definition.args
    places = [(one.arg, _KINDS.POSITIONAL_ONLY) for one in own.posonlyargs]
    places += [(one.arg, _KINDS.POSITIONAL_OR_KEYWORD) for one in own.args]
    without = len(places) - len(own.defaults)
    made = [
        inspect.Parameter(name, kind, default=inspect.Parameter.empty if index < without else None)
        for index, (name, kind) in enumerate(places)
    ]
    made += [inspect.Parameter(own.vararg.arg, _KINDS.VAR_POSITIONAL)] if own.vararg else []
    for one, default in zip(own.kwonlyargs, own.kw_defaults, strict=True):
        empty = inspect.Parameter.empty if default is None else None
        made.append(inspect.Parameter(one.arg, _KINDS.KEYWORD_ONLY, default=empty))
    made += [inspect.Parameter(own.kwarg.arg, _KINDS.VAR_KEYWORD)] if own.kwarg else []
    return inspect.Signature(made)
