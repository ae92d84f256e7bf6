"""Imports the reasoning-gym package without matplotlib, which takes half of its import: cellpylib, the library of one
task, imports it for pictures that no task draws."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

# What cellpylib imports, and the names that it takes from there.
_PICTURES = {
    "matplotlib": (),
    "matplotlib.pyplot": (),
    "matplotlib.animation": (),
    "matplotlib.collections": (),
    "mpl_toolkits": (),
    "mpl_toolkits.mplot3d": ("Axes3D",),
}


def import_reasoning_gym() -> None:
    """Raises ImportError where the package, or one that it needs, is not installed."""
    if "reasoning_gym" not in sys.modules:
        with _without_pictures():
            import reasoning_gym  # noqa: F401


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
