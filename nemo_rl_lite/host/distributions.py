"""Lists which installed distribution has which top-level package, without looking at every installed file."""

import csv
import importlib.metadata
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import Distribution


@contextmanager
def listed_quickly() -> Iterator[None]:
    """Within the block, `importlib.metadata.packages_distributions` is `packages_distributions`. transformers calls it
    when it is imported, and the standard library's asks the file system for every installed file, of which there are
    tens of thousands."""
    slow = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = packages_distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = slow


def packages_distributions() -> Mapping[str, list[str]]:
    """Return what `importlib.metadata.packages_distributions` returns. A package counts as installed where its folder
    or file exists; the files below a folder are not looked at."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        for package in _top_level(distribution):
            found.setdefault(package, []).append(distribution.metadata["Name"])
    return found


def _top_level(distribution: Distribution) -> list[str]:
    if declared := (distribution.read_text("top_level.txt") or "").split():
        return declared
    record = distribution.read_text("RECORD")
    if not record:
        # An old format, which few distributions have.
        files = distribution.files or ()
        tops = {(file.parts[0], len(file.parts) > 1) for file in files}
    else:
        # A name with a comma is quoted. A folder's name begins many lines.
        paths = (next(csv.reader([line]))[0] if line[0] == '"' else line.partition(",")[0] for line in _lines(record))
        tops = {(top, bool(below)) for top, below, _ in (path.partition("/") for path in paths)}
        tops = {one for one in tops if distribution.locate_file(one[0]).exists()}  # pyrefly: ignore
    names = {top if is_folder else inspect.getmodulename(top) for top, is_folder in tops}
    return [name for name in names if name is not None and "." not in name]


def _lines(record: str) -> Iterator[str]:
    return (line for line in record.splitlines() if line)
