"""Writes in-memory functions and rows to a run's folder, so that other processes and a resumed run can read them."""

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.user_code import PICKLED
from nemo_rl_lite.errors import ConfigError, DataError, Violation
from nemo_rl_lite.system.user_errors import as_call_error

INPUTS = "inputs"
_RANDOM_ID = re.compile(rb"[0-9a-f]{32}")


class Inputs:
    """Files of in-memory values. Names contain a digest of the content, so a resumed run finds the same files."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._named: dict[int, tuple[str, Any]] = {}
        """File name and value by the value's id. The reference keeps the id unique."""

    def path_of(self, key: str, value: Any) -> str:
        """Return the path of a function, class or callable: dotted if it can be imported, otherwise of its file.

        Raises:
            ConfigError: it cannot be pickled. `key` names it.
        """
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is value:
            return f"{module}.{name}"
        label = re.sub(r"\W", "", getattr(value, "__name__", type(value).__name__)) or "function"
        if id(value) not in self._named:
            self._write(value, label, PICKLED, _pickled(key, value))
        return f"{self._file_of(value)}:{label}"

    def rows(self, key: str, rows: Iterable[Any]) -> str:
        """Return the file of rows: dictionaries, a `datasets.Dataset` or a `pandas.DataFrame`.

        Raises:
            DataError: a row is not a dictionary or cannot be written as JSON. `key` names the rows.
        """
        if id(rows) not in self._named:
            self._write(rows, key, ".jsonl", _lines(key, rows).encode(errors="surrogatepass"))
        return str(self._file_of(rows))

    @contextmanager
    def named(self) -> Iterator[None]:
        """Replace file names by the names of values in the block's errors."""
        try:
            yield
        except ConfigError as error:
            shown = [Violation(*map(self._shown, astuple(one))) for one in error.violations]
            raise ConfigError(shown) from None
        except DataError as error:
            raise DataError(self._shown(str(error))) from None

    def _shown(self, text: Any) -> Any:
        if not isinstance(text, str):
            return text
        for name, _ in self._named.values():
            file, label = str(self._folder / name), name.rpartition("-")[0]
            # A path of code ends with its label.
            text = text.replace(f"{file}:", "") if name.endswith(PICKLED) else text.replace(file, label)
        return text

    def copy_to(self, folder: Path) -> None:
        """Copy the files to a run's folder, and use these copies from now on."""
        place = folder.absolute() / INPUTS
        for name, _ in self._named.values():
            place.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._folder / name, place / name)
        self._folder = place

    def _write(self, value: Any, label: str, suffix: str, content: bytes) -> None:
        # Remove the random ids that cloudpickle gives classes.
        digest = sha256(_RANDOM_ID.sub(b"", content) if suffix == PICKLED else content).hexdigest()
        name = f"{label}-{digest[:8]}{suffix}"
        (self._folder / name).write_bytes(content)
        self._named[id(value)] = (name, value)

    def _file_of(self, value: Any) -> Path:
        return self._folder / self._named[id(value)][0]


def _pickled(key: str, value: Any) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # a user's object may raise anything
        rule = f"cannot be sent to other processes: {as_call_error(error)}"
        fix = "open it inside the function, or give a class, which each process creates once"
        raise ConfigError([Violation(key, f"{value!r:.80}", rule, fix)]) from error


def _lines(key: str, rows: Iterable[Any]) -> str:
    """Return JSON lines."""
    if type(rows).__module__.partition(".")[0] == "pandas":
        # Writes missing values as null.
        return rows.to_json(orient="records", lines=True, force_ascii=False, date_format="iso")  # pyrefly: ignore
    return "".join(_line(f"{key}, row {number}", row) for number, row in enumerate(_each(key, rows), start=1))


def _each(key: str, rows: Iterable[Any]) -> Iterator[Any]:
    if isinstance(rows, Mapping):
        fix = f"give one split, such as {key}=data['train']"
        # Columns have values, and splits have rows.
        columns = [one for one in rows.values() if isinstance(one, list) and one and not isinstance(one[0], Mapping)]
        if 0 < len(columns) == len(rows):
            fix = f"give rows, such as {key}=datasets.Dataset.from_dict(data)"
        raise DataError(f"{key}: is a mapping ({', '.join(map(str, rows))}); {fix}")
    return iter(rows)


def _line(where: str, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: is a {type(row).__name__}; a row is a dictionary of columns")
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_plain) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: cannot be written as JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Convert an array or number of numpy or torch for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")
