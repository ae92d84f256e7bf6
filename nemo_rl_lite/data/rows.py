"""Read rows of files and of hub datasets, each with a text that names it in errors. Heavy imports are deferred."""

import glob
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_rl_lite.config.schema import DataConfig
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
    first, second = ([file for file in files_of(path) if file.exists()] for path in (one, other))
    return any(file.samefile(another) for file in first for another in second)


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


Row = Mapping[str, object]
# One of two halves that JSON writes a rare character with; without the other it cannot be text.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def file_rows(path: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a JSON or Parquet file, or of all files that a pattern such as `data/*.jsonl` matches, by name.
    A JSON file has one object a line, or is one list of objects.

    Raises:
        DataError: there is no such file, one is unreadable, or a row is not a JSON object.
    """
    for file in files_of(path):
        yield from _rows_of(file, path if file == Path(path).expanduser() else str(file))


def _rows_of(file: Path, shown: str) -> Iterator[tuple[str, Row]]:
    try:
        check_beginning(file, shown)
        for number, row in (_parquet if file.suffix == PARQUET else _json)(file):
            where = f"{shown}, row {number}"
            yield where, _parse(row, where) if isinstance(row, str) else _object(row, where)
    except FileNotFoundError:
        raise DataError(f"{shown}: no such file") from None
    except (OSError, ValueError, RuntimeError) as error:  # pyarrow raises ValueErrors
        raise DataError(f"{shown}: cannot be read: {error}") from None


def hub_rows(config: DataConfig, split: str, key: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of one split of the hub dataset `data.path`. `key` is the configuration key that names the split.

    Raises:
        DataError: the hub cannot be reached, or has no such dataset, subset or split.
    """
    import datasets

    # The download's progress bars would garble the run's own.
    datasets.disable_progress_bars()
    name = f"{config.path}" + (f" ({config.subset})" if config.subset else "")
    try:
        loaded = datasets.load_dataset(str(config.path), config.subset)
    except Exception as error:  # huggingface_hub, requests and datasets raise a dozen kinds
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        fix = "without the hub, use data=file with the rows as JSON lines or Parquet"
        raise DataError(f"data.path = {name}: cannot be loaded from the hub: {cause}; {fix}") from None
    if split not in loaded:
        raise DataError(f"{key} = {split}: {name} has no such split (splits: {', '.join(map(str, loaded))})")
    for number, row in enumerate(loaded[split], start=1):
        yield f"{name}, split {split}, row {number}", dict(row)


def _json(path: Path) -> Iterator[tuple[int, str | Row]]:
    with path.open(encoding="utf-8-sig") as lines:
        first = next((line for line in lines if line.strip()), "")
        lines.seek(0)
        if first.lstrip().startswith("["):
            yield from enumerate(json.load(lines), start=1)
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _parquet(path: Path) -> Iterator[tuple[int, Row]]:
    from pyarrow.parquet import ParquetFile

    number = 0
    with ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        hint = "a JSON file has one object a line, or is one list of objects"
        rule = f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
        raise DataError(f"{where}: {rule}; {hint}") from None
    if _SURROGATE.search(line):
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"{error.object[error.start]!a}"
            raise DataError(f"{where}: has {half}, which is half of a character and no text") from None
    return _object(row, where)


def _object(row: object, where: str) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a JSON object is needed, found {type(row).__name__}")
    return row
