"""Read rows of files and hub datasets, and their columns. Heavy imports are deferred.

Each row comes with its name for errors, such as "train.jsonl, row 3".
"""

import ast
import csv
import glob
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from math import isfinite
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, TypeGuard

from nemo_rl_lite.errors import DataError

if TYPE_CHECKING:
    from nemo_rl_lite.config.schema import DataConfig

Row = Mapping[str, object]
_JSON, _CSV, _PARQUET = (".jsonl", ".json"), ".csv", ".parquet"
_LAYOUT = "a JSON file has one object per line, or is one list of objects"
_NAMED = 'give the list a name, as in {"messages": [...]}'
_UNPACK = "unpack it with gunzip, and name the unpacked file"
_RECODE = "write it as UTF-8: iconv -f UTF-16 -t UTF-8 OLD > NEW"
# Excel's encoding of a CSV file without Unicode.
_RECODE_BYTES = "write it as UTF-8; if Excel wrote it: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"
# First bytes of files in other formats: problem and fix.
_BEGINNINGS = {
    b"\x1f\x8b": ("is compressed by gzip", _UNPACK),
    b"\xff\xfe": ("is text in UTF-16", _RECODE),
    b"\xfe\xff": ("is text in UTF-16", _RECODE),
    b"version https://git-lfs": ("is a Git LFS pointer", "git lfs pull"),
}
_NUMBER_OR_BOOLEAN = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|True|False")
# One escape of a surrogate pair. Alone it cannot be encoded.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class FileError(DataError):
    """A path does not name a file of rows."""

    def __init__(self, problem: str, fix: str):
        self.problem, self.fix = problem, fix
        super().__init__(f"{problem}; {fix}")


class MissingColumnError(DataError):
    """A row has no column of this name."""

    def __init__(self, message: str, name: str):
        super().__init__(message)
        self.name = name


def file_rows(path: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a JSON, CSV or Parquet file, or of a folder that `datasets` saved. A pattern such as
    `data/*.jsonl` or a comma-separated list names several. A JSON file has an object per line, or is a list of objects.

    Raises:
        DataError: there is no such file, one is unreadable, or a row is not a JSON object.
    """
    for file in _files_of(path):
        shown = path if file == Path(path).expanduser() else str(file)
        try:
            _check_format(file, shown)
            read = _saved_rows if file.is_dir() else _READERS.get(file.suffix, _json_rows)
            for number, row in read(file):
                where = f"{shown}, row {number}"
                yield where, _object(row, where)
        except FileNotFoundError:
            raise DataError(f"{shown}: no such file") from None
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x}"
            raise FileError(f"{shown}: cannot be read: it is not text in UTF-8 ({byte})", _RECODE_BYTES) from None
        except (OSError, ValueError, RuntimeError) as error:  # pyarrow raises ValueErrors
            raise DataError(f"{shown}: cannot be read: {error}") from None


def hub_rows(config: "DataConfig", split: str, key: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of one split of `data.path`: a hub dataset, or a folder that `datasets` saved. `key` names the
    split's configuration key. Raises DataError: the hub cannot be reached, or has no such dataset, subset or split."""
    import datasets

    # The download's progress bars would garble the console.
    datasets.disable_progress_bars()
    name = f"{config.path}" + (f" ({config.subset})" if config.subset else "")
    try:
        folder = Path(config.path or "").expanduser()
        saved = _is_saved(folder)
        loaded = datasets.load_from_disk(folder) if saved else datasets.load_dataset(str(config.path), config.subset)
    except Exception as error:  # huggingface_hub, requests and datasets raise a dozen kinds
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        fix = "without the hub, use data=file with JSON lines or Parquet"
        raise DataError(f"data.path = {name}: cannot be loaded from the hub: {cause}; {fix}") from None
    # A folder saved without splits holds training rows.
    loaded = {config.train_split: loaded} if isinstance(loaded, datasets.Dataset) else loaded
    if split not in loaded:
        raise DataError(f"{key} = {split}: {name} has no such split (splits: {', '.join(map(str, loaded))})")
    for number, row in enumerate(loaded[split], start=1):
        yield f"{name}, split {split}, row {number}", dict(row)


def share_a_file(one: str, other: str) -> bool:
    """Return whether two paths or patterns name the same file, also through links."""
    first, second = ([file for file in _files_of(path) if file.exists()] for path in (one, other))
    return any(file.samefile(another) for file in first for another in second)


def _files_of(path: str) -> list[Path]:
    """Return the file, which need not exist, or all files of a pattern or a comma-separated list.

    Raises:
        DataError: the ending is unknown, or no file matches the pattern.
    """
    if "," in path and not Path(path).exists():
        return [file for one in path.split(",") for file in _files_of(one.strip())]
    if "://" in path:
        fix = "download the file; for a dataset of the hub: data=hub data.path=ORGANISATION/NAME"
        raise FileError(f"{path}: is a URL, not a local file", fix)
    try:
        whole = Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if _is_saved(whole):
        return [whole]
    if whole.suffix not in (*_JSON, _CSV, _PARQUET):
        endings = " or ".join((_PARQUET, _CSV, *_JSON))
        raise FileError(f"{path}: the name must end in {endings}", _other_format(path))
    if not glob.has_magic(str(whole)) or whole.exists():
        return [whole]
    files = sorted(glob.glob(str(whole), recursive=True))  # noqa: PTH207 - pathlib takes no absolute patterns
    if not files:
        raise DataError(f"{path}: no file matches")
    return list(map(Path, files))


def _other_format(path: str) -> str:
    if path.endswith(".gz"):
        return _UNPACK
    if re.fullmatch(r"[\w-]+/[\w.-]+", path) and not Path(path).exists():
        return f"for a dataset of the hub: data=hub data.path={path}"
    return "name a file with one of these endings, or a pattern such as 'data/*.jsonl'"


def _check_format(file: Path, shown: str) -> None:
    """Raise FileError if a path is a folder, a pipe or a device, or has another format. Reading a pipe would block."""
    if _is_saved(file):
        return
    if file.exists() and not file.is_file():
        raise FileError(f"{shown}: is not a regular file", "name a file, or a pattern: 'data/*.jsonl'")
    with file.open("rb") as opened:
        start = opened.read(32)
    for beginning, (problem, fix) in _BEGINNINGS.items():
        if start.startswith(beginning):
            raise FileError(f"{shown}: cannot be read: it {problem}", fix)


def _json_rows(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the lines of a file, or the items of its list."""
    with path.open(encoding="utf-8-sig") as lines:
        first = next((line for line in lines if line.strip()), "")
        is_list = first.lstrip().startswith("[") and not (_is_json(first) and any(line.strip() for line in lines))
        lines.seek(0)
        if is_list:
            try:
                items = json.load(lines)
            except json.JSONDecodeError as error:
                raise ValueError(f"{error}; {_LAYOUT}") from None
            yield from enumerate(items, start=1)
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=1024)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def _is_saved(folder: Path) -> bool:
    """Return whether `datasets.save_to_disk` wrote this folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _saved_rows(folder: Path) -> Iterator[tuple[int, object]]:
    import datasets

    loaded = datasets.load_from_disk(folder)
    if isinstance(loaded, datasets.DatasetDict):
        raise FileError(
            f"{folder}: holds the splits {', '.join(map(str, loaded))}", f"name one: {folder}/{next(iter(loaded))}"
        )
    yield from enumerate(loaded, start=1)


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows below a line of names, with the types of `_typed`. In many countries Excel separates columns by
    semicolons."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        names = lines.readline()
        lines.seek(0)
        separator = next((one for one in ",;\t" if one in names), ",")
        try:
            rows = list(csv.DictReader(lines, delimiter=separator, strict=True))
        except csv.Error as error:
            raise ValueError(str(error)) from None
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} has not as many values as the first line has names")
    columns = {name: _typed([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    for number, values in enumerate(zip(*columns.values(), strict=True), start=1):
        yield number, dict(zip(columns, values, strict=True))


def _typed(texts: Sequence[str]) -> Sequence[object]:
    """Return a CSV column as numbers or booleans if Python writes them in the same way, else as texts: 007 and 7.50
    stay texts."""
    if not all(map(_NUMBER_OR_BOOLEAN.fullmatch, texts)):
        return texts
    try:
        values = list(map(ast.literal_eval, texts))
    except SyntaxError:
        # A leading zero.
        return texts
    return values if list(map(repr, values)) == list(texts) else texts


_READERS = {_PARQUET: _parquet_rows, _CSV: _csv_rows}


def _object(row: object, where: str) -> Row:
    """Return a row as a mapping. Raises DataError: it is not a JSON object, or has half of a surrogate pair."""
    if isinstance(row, str):
        line = row
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            rule = f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
            raise DataError(f"{where}: {rule}; {_LAYOUT}") from None
        if _SURROGATE.search(line):
            try:
                json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = f"{error.object[error.start]!a}"
                raise DataError(f"{where}: has {half}, half of a surrogate pair, which is not valid text") from None
    if not isinstance(row, Mapping):
        fix = _NAMED if isinstance(row, list) else _LAYOUT
        raise DataError(f"{where}: a JSON object is needed, found {type(row).__name__}; {fix}")
    return row


def column(row: Row, name: str, where: str) -> object:
    """Return the value of a column. Raises MissingColumnError: it is missing. Raises DataError: it is null."""
    value = find_column(row, name)
    if value is None and name in row:
        raise DataError(f"{where}: column '{name}' is null")
    if value is None:
        is_message = {"role", "content"} <= row.keys() or {"from", "value"} <= row.keys()
        fix = f"; this is one message of a chat: {_NAMED}" if is_message else ""
        raise MissingColumnError(f"{where}: no column '{name}' (columns: {shown_columns(row)}){fix}", name)
    return value


def find_column(row: Row, name: str) -> Any:
    """Return the value of a column, or of `column.field`; None if it is missing."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def shown_columns(row: Row) -> str:
    """Return the names of a row's columns, with the fields of nested structures."""
    return ", ".join(
        f"{name} {{{', '.join(map(str, value))}}}" if isinstance(value, Mapping) else name
        for name, value in row.items()
    )


def text_of(row: Row, name: str, where: str) -> str:
    """Return the text, number or boolean of a column as text. Raises DataError: it is missing, or something else."""
    value = column(row, name, where)
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, Mapping):
        fields = ", ".join(map(str, value))
        raise DataError(f"{where}: column '{name}' must be text or a number, not a structure (its fields: {fields})")
    if not is_number(value):
        raise DataError(f"{where}: column '{name}' must be text or a number, found {value!r:.80}")
    # Parquet and pandas turn a 7 into 7.0 in a column with gaps. Exponents are written out.
    if isinstance(value, int):
        return str(value)
    text = format(Decimal(repr(float(value) or 0.0)), "f")
    return text.rstrip("0").removesuffix(".") if "." in text else text


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a finite number; booleans are not."""
    return isfinite(value) if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)


def template_columns(template: str) -> list[str]:
    """Return the columns that a template names, in order. Raises ValueError: braces do not match, or a field is not a
    plain column name."""
    columns = []
    for _, name, specification, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name or specification or conversion or any(mark in name for mark in ".["):
            raise ValueError(f"the field {name!r} is not a plain column name")
        columns.append(name)
    return columns


def filled(template: str, row: Row, where: str) -> str:
    """Fill a template with a row's columns. Unlike str.format, it reads no attributes. Raises DataError: a column is
    missing, or is neither text nor a number."""
    return "".join(
        text + ("" if name is None else text_of(row, name, where)) for text, name, _, _ in Formatter().parse(template)
    )
