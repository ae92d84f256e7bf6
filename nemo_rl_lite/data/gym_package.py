"""Imports the part of the reasoning-gym package that has a task, in a tenth of the time of the whole. That part comes
without matplotlib, which cellpylib, the library of one task, imports for pictures that no task draws."""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

from nemo_rl_lite.host.lazy_package import import_all, import_lazily, modules_with

_PACKAGE = "reasoning_gym"
# What cellpylib imports, and the names that it takes from there.
_PICTURES = {
    "matplotlib": (),
    "matplotlib.pyplot": (),
    "matplotlib.animation": (),
    "matplotlib.collections": (),
    "mpl_toolkits": (),
    "mpl_toolkits.mplot3d": ("Axes3D",),
}


@cache
def import_task(name: str) -> None:
    """Import what registers a task: its family, or where none of them names it, all.

    Raises:
        ImportError: the package, or one that it needs, is not installed.
    """
    import_lazily(_PACKAGE)
    # The factory of tasks and this module import each other, and it has to come first.
    importlib.import_module(f"{_PACKAGE}.coaching")
    modules = modules_with(_PACKAGE, rf"(?m)^DATASET_NAME = [\"']{re.escape(name)}[\"']")
    with _without_pictures():
        for module in modules:
            importlib.import_module(module)
    if not modules:
        # There is no such task, or it is the one that is made of others.
        import_whole()


def import_whole() -> None:
    """Import the rest of the package where a part of it is imported, so that a user's code finds all tasks in it."""
    if _PACKAGE in sys.modules:
        with _without_pictures():
            import_all(_PACKAGE)


@contextmanager
def _without_pictures() -> Iterator[None]:
    """Within the block empty modules stand for matplotlib, unless it is imported already."""
    placeholders = {} if "matplotlib" in sys.modules else {name: ModuleType(name) for name in _PICTURES}
    for name, module in placeholders.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(placeholders[parent], own, module)
        vars(module).update(dict.fromkeys(_PICTURES[name]))
        module.__path__ = []
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        for name in placeholders:
            del sys.modules[name]
