"""Import user code by path: `package.module.name`, `path/to/file.py:name`, or `path/to/file.pkl:name`.

A file is imported as a module below this one, whose name holds the file's absolute path. So its functions and classes
can be pickled: a process that loads them imports this module, which finds the file again. A .pkl file holds one object,
pickled by cloudpickle with the code of its functions (`run/inputs.py` writes it).
"""

import importlib
import re
import socket
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.system.user_errors import as_call_error, place_of

_IN_A_FILE = re.compile(r"(?P<file>.+\.(?:py|pkl)):(?P<name>\w+)")
PICKLED = ".pkl"
# Python asks for modules below this one only if it is a package, which has a search path.
__path__: list[str] = []


def imported(path: str) -> Any:
    """Import an object by its path. Exceptions of its module pass through.

    Raises:
        ImportError: there is no such module, file or name.
    """
    file, name = file_of(path), own_name(path)
    if file is not None and file.suffix == PICKLED:
        return _unpickled(file)
    # Quoted dots, because a dot would separate packages.
    quoted = quote(str(file), safe="").replace(".", "%2E")
    module = importlib.import_module(path.rpartition(".")[0] if file is None else f"{__name__}.{quoted}")
    try:
        return getattr(module, name)
    except AttributeError:
        raise ImportError(f"{file or module.__name__} has no {name}") from None


def imported_for(key: str, path: str, fix: str) -> Any:
    """Import a user's function or class for a configuration key.

    Raises:
        ConfigError: it cannot be imported, or cannot be called.
    """
    try:
        found = imported(path)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        rule = f"cannot be imported: {as_call_error(error)}{place_of(error)}"
        raise ConfigError([Violation(key, path, rule, fix)]) from error
    if not callable(found):
        raise ConfigError([Violation(key, path, "is not a function", fix)])
    return found


def file_of(path: str) -> Path | None:
    """Return the absolute path of the file in `FILE:name`; None for a dotted path."""
    found = _IN_A_FILE.fullmatch(path)
    return Path(found["file"]).expanduser().absolute() if found else None


def own_name(path: str) -> str:
    """Return the object's name without its module or file."""
    found = _IN_A_FILE.fullmatch(path)
    return found["name"] if found else path.rpartition(".")[2]


@cache
def _unpickled(file: Path) -> Any:
    """Load an object. Its file's name holds a digest of it."""
    import cloudpickle

    if not file.is_file():
        raise ImportError(_missing(file))
    return cloudpickle.loads(file.read_bytes())


def _missing(file: Path) -> str:
    return f"there is no file {file} on {socket.gethostname()}; every machine of a run needs it at the same place"


class _UserFiles(MetaPathFinder):
    """Finds a user's file by the name of its module."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        file = Path(unquote(fullname.removeprefix(f"{__name__}.")))
        if not file.is_file():
            raise ModuleNotFoundError(_missing(file), name=fullname)
        return spec_from_file_location(fullname, file)


sys.meta_path.insert(0, _UserFiles())
