"""Load training and validation data: rows of files and hub datasets, or generated tasks."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from nemo_rl_lite.config.schema import DataConfig
from nemo_rl_lite.config.user_code import imported_for
from nemo_rl_lite.data.formats import Example, RowFormat
from nemo_rl_lite.data.problems import Derived, FileSet, LeftOut, Problem, Prompted, TrainingSet, place
from nemo_rl_lite.data.rows import Row, file_rows, find_column, hub_rows, share_a_file
from nemo_rl_lite.data.tasks import TASKS
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.system.user_errors import as_call_error, place_of

log = logging.getLogger(__name__)
ROWS = ("file", "hub")
RowMap = Callable[[dict[str, Any]], Mapping[str, Any] | None]


def training_set[T: Prompted](config: DataConfig, seed: int, kind: RowFormat[T]) -> TrainingSet[T]:
    """Return the training data, shuffled or generated from `seed`. Raises DataError: a row cannot be read; the error
    names file, row and cause."""
    if config.name in TASKS:
        return Derived(TASKS[config.name](config, seed), kind.from_problem)
    items = _used(config, _training_rows(config, is_logged=True), kind)
    _, kept = _split(config, items)
    if not kept:
        raise DataError(_empty(config, items, "to train on"))
    return FileSet(tuple(kept), seed, config.shuffle)


def validation_set[T: Prompted](
    config: DataConfig, limit: int, kind: RowFormat[T], training: Sequence[T] = ()
) -> list[T]:
    """Return at most `limit` held-out items, always the same ones; none if nothing is held out. Log how many of them
    are also `training` items. Raises DataError: a row cannot be read; the error names file, row and cause."""
    if config.name in TASKS:
        return list(map(kind.from_problem, TASKS[config.name](config, 0).validation(limit)))
    if validation_source(config) is not None:
        return _own_validation_set(config, limit, kind, training)
    if not config.validation_fraction:
        return []
    items, _ = _read(config, _training_rows(config), kind)
    held_out, _ = _split(config, items)
    if not held_out:
        raise DataError(_empty(config, items, "held out"))
    return held_out[:limit]


def data_identity(training: Sequence[object], held_out: Sequence[object] = ()) -> dict[str, Any]:
    """Return count and digest of the rows, so that a resumed run can detect changed data. Held-out rows are under
    `validation`. Endless tasks have no training entry."""
    return _identity(training) | ({"validation": _identity(held_out)} if held_out else {})


def _identity(items: Sequence[object]) -> dict[str, Any]:
    if not items:
        return {}
    digest = hashlib.sha256()
    for one in items:
        digest.update(repr(one).encode(errors="surrogatepass"))
    return {"rows": len(items), "sha256": digest.hexdigest()}


def validation_source(config: DataConfig) -> str | None:
    """Return the validation file or split, or None."""
    return config.validation_path if config.name == "file" else config.validation_split


def check_file(config: DataConfig, path: str, limit: int, kind: RowFormat) -> None:
    """Read the first `limit` rows of a file. Raises DataError: a row has another format, or there are no rows."""
    rows = list(islice(_mapped(config, file_rows(path)), limit))
    if not rows:
        raise DataError(f"{path}: no rows")
    _read(config, rows, kind, all_rows=len(rows) < limit)


def _own_validation_set[T: Prompted](
    config: DataConfig, limit: int, kind: RowFormat[T], training: Sequence[T]
) -> list[T]:
    """Return the items of the validation file or split."""
    source, path = validation_source(config), config.validation_path or ""
    if config.name == "file" and config.train_path and share_a_file(config.train_path, path):
        log.warning("data.validation_path and data.train_path share a file: the run validates on its training rows")
        training = ()
    rows = hub_rows(config, source or "", "data.validation_split") if config.name == "hub" else file_rows(path)
    first = list(islice(_mapped(config, rows), limit))
    if not first:
        raise DataError(f"{source}: no rows")
    held_out, trained = _used(config, first, kind), set(map(_texts, training))
    if count := sum(_texts(one) in trained for one in held_out):
        log.warning("%s: %d of the %d validation rows are also training rows", source, count, len(held_out))
    return held_out


def _texts(one: Prompted) -> tuple[str, ...]:
    answers = [one.answer] if isinstance(one, Problem) else []
    trained = [each.messages[each.first_trained :] for each in one.conversations] if isinstance(one, Example) else []
    return (*(message["content"] for said in (one.messages, *trained) for message in said), *answers)


def _read[T: Prompted](
    config: DataConfig, rows: Iterable[tuple[str, Row]], kind: RowFormat[T], all_rows: bool = True
) -> tuple[list[T], Counter[LeftOut]]:
    """Convert rows to items. Return the items, and the number of rows left out for each reason. Raises DataError: a row
    cannot be read, or `all_rows` of the data are left out."""
    kept, left_out, first, tools = list[T](), Counter[LeftOut](), "", config.tools_column
    has_tools = tools is None
    for where, row in rows:
        first = first or where
        found = kind.from_row(config, row, where)
        if isinstance(found, LeftOut):
            left_out[found] += 1
        else:
            kept.append(found)
        has_tools = has_tools or tools in row or find_column(row, tools or "") is not None
    if first and not has_tools:
        raise DataError(f"{config.train_path or config.path}: no row has the column '{tools}' (data.tools_column)")
    if first and not kept and all_rows:
        whys = " and ".join(f"{count} {why}" for why, count in left_out.items())
        raise DataError(f"{first} and the {left_out.total() - 1} after it are all left out: {whys}")
    return kept, left_out


def _used[T: Prompted](config: DataConfig, rows: Iterable[tuple[str, Row]], kind: RowFormat[T]) -> list[T]:
    """Convert rows to items, and log how many are left out."""
    kept, left_out = _read(config, rows, kind)
    for why, count in left_out.items():
        log.warning("%d of %d rows %s and were left out", count, len(kept) + left_out.total(), why)
    return kept


def _split[T: Prompted](config: DataConfig, items: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return the held-out items and the training items. At least one of several prompts is held out."""
    places = [place(one) for one in items]
    # In a small dataset all hashes may exceed the fraction.
    least = min(places, default=0.0) if len(set(places)) > 1 and config.validation_fraction else -1.0
    held, kept = list[T](), list[T]()
    for one, at in zip(items, places, strict=True):
        (held if at < config.validation_fraction or at == least else kept).append(one)
    return held, kept


def _training_rows(config: DataConfig, is_logged: bool = False) -> Iterator[tuple[str, Row]]:
    """Return the rows that `data.map` keeps, at most `data.max_samples`."""
    if config.name == "hub":
        rows = hub_rows(config, config.train_split, "data.train_split")
    elif config.train_path is None:
        raise DataError("data.train_path is null: name a file")
    else:
        rows = file_rows(config.train_path)
    return islice(_mapped(config, rows, is_logged), config.max_samples)


def row_map(config: DataConfig) -> RowMap | None:
    """Import the function `data.map`. Raises ConfigError: it cannot be imported, or is not a function."""
    fix = "name a function of one row: path/to/file.py:function, or package.module.function"
    return None if config.map is None else imported_for("data.map", config.map, fix)


def _mapped(config: DataConfig, rows: Iterable[tuple[str, Row]], is_logged: bool = False) -> Iterator[tuple[str, Row]]:
    """Apply `data.map` to each row, and drop the rows for which it returns None. `is_logged`: log their number. Raises
    DataError: the function raises, returns no row, or drops all rows."""
    function = row_map(config)
    if function is None:
        yield from rows
        return
    kept, dropped = 0, 0
    try:
        for where, row in rows:
            found = _changed(config, function, where, row)
            if found is None:
                dropped += 1
            else:
                kept += 1
                yield where, found
    finally:
        if is_logged and dropped:
            log.info("data.map dropped %d of %d rows", dropped, dropped + kept)
    if dropped and not kept:
        raise DataError(f"data.map = {config.map} returned None for all {dropped} rows")


def _changed(config: DataConfig, function: RowMap, where: str, row: Row) -> Row | None:
    try:
        found = function(dict(row))
    except Exception as error:  # a user's function may raise anything
        rule = f"data.map = {config.map} raised {as_call_error(error)}{place_of(error)}"
        raise DataError(f"{where}: {rule}") from error
    if found is not None and not isinstance(found, Mapping):
        rule = f"data.map = {config.map} returned a {type(found).__name__}"
        raise DataError(f"{where}: {rule}; return the row as a dictionary, or None to drop it")
    return found


def _empty(config: DataConfig, items: Sequence[Prompted], what: str) -> str:
    source = config.train_path or config.path
    if not items:
        return f"{source}: no rows"
    different, fraction = len({str(one.messages) for one in items}), config.validation_fraction
    together = f"rows with equal prompts stay together; distinct prompts: {different}"
    fix = "; add rows, or hold out others: data.validation_path=FILE" if different == 1 else ""
    rule = f"none of the {len(items)} rows is {what} with data.validation_fraction = {fraction} ({together})"
    return f"{source}: {rule}{fix}"
