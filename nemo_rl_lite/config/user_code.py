"""Import what a configuration names: `package.module.name`, or `path/to/file.py:name`.

A file is imported as a module below this one, whose name holds the file's absolute path. So its functions and classes
can be pickled: a process that loads them imports this module, which finds the file again.
"""

import importlib
import re
import socket
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

_IN_A_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")
# Python asks for modules below this one only if it is a package, which has a search path.
__path__: list[str] = []


def imported(path: str) -> Any:
    """Import the object that a path names. What its module raises passes through.

    Raises:
        ImportError: there is no such module, file or name.
    """
    file, name = file_of(path), own_name(path)
    # Quoted dots, because a dot would separate packages.
    quoted = quote(str(file), safe="").replace(".", "%2E")
    module = importlib.import_module(path.rpartition(".")[0] if file is None else f"{__name__}.{quoted}")
    try:
        return getattr(module, name)
    except AttributeError:
        raise ImportError(f"{file or module.__name__} has no {name}") from None


def file_of(path: str) -> Path | None:
    """Return the absolute path of the file in `path/to/file.py:name`; None for a dotted path."""
    found = _IN_A_FILE.fullmatch(path)
    return Path(found["file"]).expanduser().absolute() if found else None


def own_name(path: str) -> str:
    """Return the object's name without its module or file."""
    found = _IN_A_FILE.fullmatch(path)
    return found["name"] if found else path.rpartition(".")[2]


class _UserFiles(MetaPathFinder):
    """Finds a user's file by the name of its module."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        file = Path(unquote(fullname.removeprefix(f"{__name__}.")))
        if not file.is_file():
            where = f"on {socket.gethostname()}; every machine of a run needs it at the same place"
            raise ModuleNotFoundError(f"there is no file {file} {where}", name=fullname)
        return spec_from_file_location(fullname, file)


sys.meta_path.insert(0, _UserFiles())
