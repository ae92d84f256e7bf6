"""Read rows of files and of hub datasets, each with a text that names it in errors. Heavy imports are deferred."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_rl_lite.config.sections.data import DataConfig
from nemo_rl_lite.data.files import PARQUET, check_beginning, files_of
from nemo_rl_lite.errors import DataError

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
            yield from enumerate(json.load(lines, parse_constant=_refuse, object_pairs_hook=_unique), start=1)
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, object]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key '{next(name for name in row if names.count(name) > 1)}' is there twice")
    return row


def _parquet(path: Path) -> Iterator[tuple[int, Row]]:
    from pyarrow.parquet import ParquetFile

    number = 0
    with ParquetFile(path) as file:
        _unique([(name, None) for name in file.schema_arrow.names])
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line, parse_constant=_refuse, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        hint = "a JSON file has one object a line, or is one list of objects"
        raise DataError(
            f"{where}: not JSON ({error.msg.removesuffix(' at')} at column {error.colno}); {hint}"
        ) from None
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
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
