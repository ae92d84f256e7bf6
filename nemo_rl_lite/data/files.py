"""Find the files of a data path, and say what to do with files that are not rows of JSON or Parquet."""

import glob
import re
from pathlib import Path

from nemo_rl_lite.errors import DataError

JSON = (".jsonl", ".json")
PARQUET = ".parquet"
_UNPACK = "unpack it with gunzip, and name the file that this makes"
_RECODE = "write it as UTF-8: iconv -f UTF-16 -t UTF-8 OLD > NEW"
# How files of another format begin -> what they are, and what to do with them.
_BEGINNINGS = {
    b"\x1f\x8b": ("is compressed by gzip", _UNPACK),
    b"\xff\xfe": ("is text in UTF-16", _RECODE),
    b"\xfe\xff": ("is text in UTF-16", _RECODE),
    b"version https://git-lfs": ("is a pointer of Git LFS, which stands for the file", "git lfs pull"),
}


class FileError(DataError):
    """A path is not a file of rows. `problem` says what it is, and `fix` what to do about it."""

    def __init__(self, problem: str, fix: str):
        self.problem, self.fix = problem, fix
        super().__init__(f"{problem}; {fix}")


def files_of(path: str) -> list[Path]:
    """Return the file, or all files that a pattern such as `data/*.jsonl` matches, by name. The file need not exist.

    Raises:
        DataError: the name is not one of a JSON or Parquet file, or no file matches the pattern.
    """
    if "://" in path:
        fix = "download the file; for a dataset of the hub: data=hub data.path=ORGANISATION/NAME"
        raise FileError(f"{path}: is an address, not a file of this machine", fix)
    if Path(path).suffix not in (*JSON, PARQUET):
        raise FileError(f"{path}: the name must end in {PARQUET}, or in {' or '.join(JSON)}", _other_format(path))
    try:
        whole = Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not glob.has_magic(str(whole)) or whole.exists():
        return [whole]
    files = sorted(glob.glob(str(whole), recursive=True))  # noqa: PTH207 - pathlib takes no absolute patterns
    if not files:
        raise DataError(f"{path}: no file matches")
    return list(map(Path, files))


def check_beginning(file: Path, shown: str) -> None:
    """Raise FileError where a file is a folder, a pipe or a device, or is in another format. A pipe would wait."""
    if file.exists() and not file.is_file():
        raise FileError(f"{shown}: cannot be read: it is no regular file", "name a file, or a pattern: 'data/*.jsonl'")
    with file.open("rb") as opened:
        start = opened.read(32)
    for beginning, (problem, fix) in _BEGINNINGS.items():
        if start.startswith(beginning):
            raise FileError(f"{shown}: cannot be read: it {problem}", fix)


def share_a_file(one: str, other: str) -> bool:
    """Return whether two paths name a file in common, through links and other spellings too."""
    first, second = ({_identity(file) for file in files_of(path) if file.exists()} for path in (one, other))
    return not first.isdisjoint(second)


def _identity(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino


def _other_format(path: str) -> str:
    """What to do about a name of another ending."""
    if path.endswith(".gz"):
        return _UNPACK
    if path.endswith(".csv"):
        table = f"pandas.read_csv({path!r})"
        return f"write it as JSON, in Python: {table}.to_json('rows.jsonl', orient='records', lines=True)"
    if re.fullmatch(r"[\w-]+/[\w.-]+", path) and not Path(path).exists():
        return f"for a dataset of the hub: data=hub data.path={path}"
    return "name such a file, or a pattern such as 'data/*.jsonl'"
