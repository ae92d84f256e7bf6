"""Digests of a checkpoint's files: a bit that flipped on a disk changes weights without an error anywhere else."""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Reading a file and computing its digest release the interpreter's lock; disks and CPUs both have room for this many.
_THREADS = 8
# Names that a network file system gives to files that were removed while open.
_REMOVED = ".nfs"


def digests_of(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 in hexadecimal of each file, by its path below `folder`. Raises OSError: a file cannot be read."""
    paths = sorted(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        return {
            path.relative_to(folder).as_posix(): own for path, own in zip(paths, pool.map(_digest, paths), strict=True)
        }


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and in those in it."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(_REMOVED)]


def difference(folder: Path, files: Iterable[Path], expected: Mapping[str, str]) -> str:
    """What is wrong with the `files` of a folder, which should have the `expected` digests; empty where they do."""
    names = {path.relative_to(folder).as_posix(): path for path in files}
    if missing := sorted(expected.keys() - names.keys()):
        return f"{missing[0]} is missing"
    if foreign := sorted(names.keys() - expected.keys()):
        return f"{foreign[0]} is not one of its files"
    found = digests_of(folder, names.values())
    return next((f"{name} is not what was saved" for name in sorted(expected) if found[name] != expected[name]), "")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
