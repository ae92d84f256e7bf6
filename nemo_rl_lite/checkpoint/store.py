"""Store a run's checkpoints, each complete or absent whenever the process ends. Imports nothing heavy.

A checkpoint is a folder such as `step-00000120`. Its `checkpoint.json` has digests of all files and of itself, because
a bit that flips on disk would change weights silently. Digests of the policy's large files are by part, so that the
rank that reads a part verifies it. The folder is written under a name that begins with a dot, synced, and then renamed.
Older checkpoints stay until the new one is complete; `latest` names the newest.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Buffer, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import xxhash

from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.system.machine import why_full

log = logging.getLogger(__name__)
RECORD, PREFIX = "checkpoint.json", "step-"
LATEST, _REPLACED = "latest", ".replaced-"
# The policy's subfolder of a checkpoint.
POLICY = "policy"
# Threads that compute digests; reading and hashing release the GIL.
_THREADS = 8
# NFS renames files to this prefix when they are removed while open.
_REMOVED = ".nfs"
_HAS_CHANGED = "{} has changed since it was saved"
Part = tuple[int, str]
"""Length of a part of a file in bytes, and its digest."""


@dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint."""

    path: Path
    step: int
    metrics: Mapping[str, float]
    """Validation metrics of the step."""
    record: Mapping[str, Any]
    """Description of the run."""
    files: Mapping[str, str]
    """Digest of each file without parts."""
    parts: Mapping[str, Sequence[Part]]
    """Parts of each other file, from its begin to its end."""


@dataclass(frozen=True)
class Retention:
    """Number of newest checkpoints to keep, and of best ones by `metric`."""

    newest: int
    best: int
    metric: str | None
    higher_is_better: bool


class CheckpointStore:
    """Folder of a run's checkpoints."""

    def __init__(self, folder: Path, retention: Retention = Retention(1, 0, None, True)):
        self.folder, self._retention = folder, retention

    def begin(self, step: int) -> Path:
        """Return a new empty folder for the checkpoint of `step`; readers ignore its name. Raises CheckpointError."""
        unfinished = self._unfinished(step)
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be written to {self.folder}: {error}") from error
        return unfinished

    def finish(
        self,
        step: int,
        metrics: Mapping[str, float],
        record: Mapping[str, Any],
        parts: Mapping[str, Sequence[Part]] | None = None,
    ) -> Checkpoint:
        """Complete the checkpoint of `step`, and remove those that retention drops. `parts`: those of some files, by
        path in the checkpoint. Raises CheckpointError: it was not written completely; older checkpoints are
        unchanged."""
        unfinished, target = self._unfinished(step), self.folder / folder_name(step)
        known = dict(parts or {})
        try:
            others = [file for file in files_below(unfinished) if file.relative_to(unfinished).as_posix() not in known]
            done = Checkpoint(target, step, dict(metrics), dict(record), digests_of(unfinished, others), known)
            write_record(unfinished, done)
            for path in [*unfinished.rglob("*"), unfinished]:
                to_disk(path)
            replaced = self.folder / f"{_REPLACED}{target.name}"
            if target.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                target.rename(replaced)
            unfinished.rename(target)
            to_disk(self.folder)
        except OSError as error:
            raise CheckpointError(f"step {step} cannot be written to {self.folder}: {error}") from error
        try:
            shutil.rmtree(replaced, ignore_errors=True)
            pointer = self.folder / f".{LATEST}"
            pointer.write_text(f"{target.name}\n")
            to_disk(pointer)
            pointer.replace(self.folder / LATEST)
            self._prune()
        except OSError as error:
            log.warning("the checkpoint of step %d is complete, but older ones were not removed: %s", step, error)
        return done

    def tidy(self) -> None:
        """Clean up after a killed run: remove unfinished checkpoints, and restore a replaced one without successor."""
        for replaced in self.folder.glob(f"{_REPLACED}{PREFIX}*"):
            target = self.folder / replaced.name.removeprefix(_REPLACED)
            if load(target) is None and load(replaced) is not None:
                shutil.rmtree(target, ignore_errors=True)
                replaced.rename(target)
            shutil.rmtree(replaced, ignore_errors=True)
        for unfinished in self.folder.glob(f".{PREFIX}*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write `metrics` into the checkpoint of `step`, if there is one. Raises CheckpointError."""
        target = self.folder / folder_name(step)
        if (found := load(target)) is None:
            return
        try:
            write_record(target, replace(found, metrics=dict(metrics)))
        except OSError as error:
            raise CheckpointError(f"the metrics of step {step} were not written to {target}: {error}") from error

    def discard(self, step: int) -> None:
        """Remove the unfinished checkpoint of `step`."""
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def complete(self) -> list[Checkpoint]:
        """Return all complete checkpoints, oldest first, without reading their files."""
        found = map(load, self._folders())
        return sorted((one for one in found if one is not None), key=lambda one: one.step)

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint after `checked`, or None if there is none.

        Raises CheckpointError: it is damaged. The message names the newest intact checkpoint.
        """
        folders = self._folders()
        if not folders:
            return None
        try:
            return checked(folders[-1])
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {way_out(folders[-1])}") from error

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".{folder_name(step)}"

    def _folders(self) -> list[Path]:
        return _folders(self.folder)

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None."""
        checkpoints = self.complete()
        return checkpoints[-1] if checkpoints else None

    def best(self, count: int = 1) -> list[Checkpoint]:
        """Return the `count` checkpoints with the best metric, best first; on ties, newer first."""
        metric, sign = self._retention.metric, 1 if self._retention.higher_is_better else -1
        measured = [one for one in self.complete() if math.isfinite(one.metrics.get(metric or "", math.nan))]
        return sorted(measured, key=lambda one: (sign * one.metrics[metric or ""], one.step), reverse=True)[:count]

    def _prune(self) -> None:
        checkpoints = self.complete()
        kept = {one.path for one in checkpoints[-self._retention.newest :]}
        kept |= {one.path for one in self.best(self._retention.best)}
        for one in checkpoints:
            if one.path not in kept:
                # Rename first, so that an interrupted removal leaves no incomplete checkpoint.
                gone = one.path.with_name(f".{one.path.name}")
                shutil.rmtree(gone, ignore_errors=True)
                one.path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


def has_any(folder: Path) -> bool:
    """Return whether the folder has a checkpoint, including a replaced one that `tidy` would restore."""
    return any(path for begin in ("", _REPLACED) for path in folder.glob(f"{begin}{PREFIX}*"))


def load(path: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder by its record, or None if it is not complete."""
    try:
        return read(path)
    except CheckpointError:
        return None


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder by its record. Raises CheckpointError: the record is missing or damaged."""
    try:
        content = json.loads((path / RECORD).read_text())
        step, metrics, record, files = content["step"], content["metrics"], content["record"], content["files"]
        parts, own = content["parts"], content.pop("digest")
        kinds = [(step, int), *((one, dict) for one in (metrics, record, record.get("config", {}), files, parts))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has no {RECORD} that can be read ({type(error).__name__}: {error})") from error
    if own != _record_digest(content) or not all(isinstance(value, kind) for value, kind in kinds):
        raise CheckpointError(f"{path / RECORD} has changed since it was saved")
    if path.name.startswith(PREFIX) and path.name != folder_name(step):
        raise CheckpointError(f"the record in {path} is of step {step}")
    return Checkpoint(path, step, metrics, record, files, parts)


def checked(path: Path, parts: bool = False) -> Checkpoint:
    """Return the checkpoint in a folder, if it has all its files, and these have their sizes and digests. Digests of
    parts are compared only if `parts`, because the rank that reads a part does so.

    Raises CheckpointError: a file is missing, damaged, or not one of the checkpoint's.
    """
    found = read(path)
    try:
        trouble = _trouble(found, parts)
    except OSError as error:
        trouble = f"it cannot be read: {error}"
    if trouble:
        raise CheckpointError(damage(path, trouble))
    return found


def _trouble(checkpoint: Checkpoint, with_parts: bool) -> str:
    """Describe the first difference between a checkpoint's files and its record; "" if there is none."""
    path, whole, parts = checkpoint.path, checkpoint.files, checkpoint.parts
    names = {file.relative_to(path).as_posix(): file for file in files_below(path)}
    for own in (RECORD, f".{RECORD}"):
        names.pop(own, None)
    if missing := sorted((whole.keys() | parts.keys()) - names.keys()):
        return f"{missing[0]} is missing"
    if foreign := sorted(names.keys() - whole.keys() - parts.keys()):
        return f"{foreign[0]} is not one of its files"
    digests = digests_of(path, (names[name] for name in whole))
    wrong = {name for name in whole if digests[name] != whole[name]}
    wrong |= {name for name in parts if names[name].stat().st_size != sum(length for length, _ in parts[name])}
    if with_parts and not wrong:
        with ThreadPoolExecutor(_THREADS) as pool:
            intact = pool.map(lambda name: _are_intact(names[name], parts[name]), parts)
            wrong = {name for name, is_intact in zip(parts, intact, strict=True) if not is_intact}
    return _HAS_CHANGED.format(min(wrong)) if wrong else ""


def damage(path: Path, trouble: str) -> str:
    """Return the message of a damaged checkpoint."""
    return f"the checkpoint {path} is damaged: {trouble}"


def has_changed(path: Path, name: str) -> CheckpointError:
    """Return the error of a checkpoint with a file that differs from the record."""
    return CheckpointError(damage(path, _HAS_CHANGED.format(name)))


def explained(error: CheckpointError, path: Path) -> CheckpointError:
    """Return the error of reading the checkpoint in a folder, or that of its damage, with a way out."""
    try:
        checked(path, parts=True)
    except CheckpointError as found:
        return CheckpointError(f"{found}; {way_out(path)}")
    return error


def way_out(damaged: Path) -> str:
    """Name the newest intact checkpoint that is older than a damaged one, and what a user can do."""
    offer, fix = "no older one is intact", "from the start"
    for path in reversed([one for one in _folders(damaged.parent) if one.name < damaged.name]):
        with suppress(CheckpointError):
            offer, fix = f"the newest intact one is {checked(path, parts=True).path}", "from there"
            break
    return f"{offer}; fix: restore it, or move it away to resume {fix}"


def _folders(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*"))


def write_record(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint's record atomically. Raises OSError."""
    content = {name: getattr(checkpoint, name) for name in ("step", "metrics", "record", "files", "parts")}
    content["digest"] = _record_digest(content)
    unfinished = folder / f".{RECORD}"
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    # The configuration in it may be private.
    unfinished.chmod(0o640)
    to_disk(unfinished)
    unfinished.replace(folder / RECORD)


def _record_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def folder_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def to_disk(path: Path) -> None:
    """Sync a file or folder to disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digests_of(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file in hexadecimal, by its path below `folder`. Raises OSError."""
    paths = sorted(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        names = [path.relative_to(folder).as_posix() for path in paths]
        return dict(zip(names, pool.map(_file_digest, paths), strict=True))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _are_intact(file: Path, parts: Sequence[Part]) -> bool:
    with file.open("rb") as opened:
        return all(has_digest(opened.read(length), digest) for length, digest in parts)


def has_digest(content: Buffer, digest: str) -> bool:
    """Return whether a part has this digest: its XXH3, or in older checkpoints its SHA-256, in hexadecimal."""
    is_older = len(digest) == 2 * hashlib.sha256().digest_size
    return digest == (hashlib.sha256(content) if is_older else xxhash.xxh3_128(content)).hexdigest()


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(_REMOVED)]


SaveRollouts = Callable[[Path], Mapping[str, Any]]
"""Returns the state from which rollouts resume; large state goes to files in the checkpoint's folder."""


class Saver(Protocol):
    """Policy as saving sees it; see `policy.interface.Policy`."""

    def begin_save(self, folder: str) -> None: ...

    def save_is_written(self) -> bool: ...

    def finish_save(self) -> dict[str, list[Part]]: ...


class Checkpoints:
    """Saves every `period` steps (0: never) and on request, one checkpoint at a time.

    A failed save is a warning, and training continues; `require` raises if the last one failed.
    """

    def __init__(
        self,
        store: CheckpointStore,
        policy: Saver,
        period: int,
        asynchronous: bool,
        record: Mapping[str, Any],
        say: Callable[[str], None],
        saved: int | None = None,
        rollouts: SaveRollouts = lambda folder: {},
    ):
        """Every checkpoint contains `record` and the result of `rollouts`. `saved`: the step that this run resumed
        from."""
        self.store, self._policy, self._period, self._asynchronous = store, policy, period, asynchronous
        self._record, self._say, self._rollouts = dict(record), say, rollouts
        self._writing: int | None = None
        self._saved = saved
        self._begun_s = 0.0
        self.longest_save_s = 0.0
        self._failure: CheckpointError | None = None
        self._measured: tuple[int, dict[str, float]] = (-1, {})

    @property
    def enabled(self) -> bool:
        return self._period > 0

    def save_if_due(self, step: int, last: bool) -> bool:
        """Save after every `period`-th step and after the last one. Return whether this is such a step."""
        due = self.enabled and (last or step % self._period == 0)
        if due:
            self.save(step)
        return due

    def save(self, step: int) -> None:
        """Save the state after `step`, once, in the policy's training phase. Training may overlap with the writing. A
        run without a period saves when it is stopped."""
        if step == self._saved:
            return
        self.finish()
        self._saved, self._failure, self._begun_s = step, None, time.monotonic()
        try:
            folder = self.store.begin(step)
            self._record |= {"rollouts": dict(state)} if (state := self._rollouts(folder)) else {}
            (folder / POLICY).mkdir()
            self._policy.begin_save(str(folder / POLICY))
        except (CheckpointError, OSError) as error:
            self._fail(step, error)
            return
        self._writing = step
        if not self._asynchronous:
            self.finish()

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the validation metrics of `step`, by which retention ranks checkpoints."""
        self._measured = (step, dict(metrics))
        try:
            if step != self._writing:
                self.store.measured(step, metrics)
        except CheckpointError as error:
            self._say(f"warning: {error}")

    def finish_if_written(self) -> None:
        """Complete the checkpoint in flight if it is written; does not wait."""
        if self._writing is not None and self._policy.save_is_written():
            self.finish()

    def require(self) -> None:
        """Raise CheckpointError if the last checkpoint was not written."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait for the checkpoint in flight, and complete it."""
        step, self._writing = self._writing, None
        if step is None:
            return
        try:
            parts = {f"{POLICY}/{name}": own for name, own in self._policy.finish_save().items()}
            measured_at, metrics = self._measured
            saved = self.store.finish(step, metrics if measured_at == step else {}, self._record, parts)
            self.longest_save_s = max(self.longest_save_s, time.monotonic() - self._begun_s)
            log.info("checkpoint of step %d: %s", step, saved.path)
        except CheckpointError as error:
            self._fail(step, error)

    def _fail(self, step: int, error: Exception) -> None:
        # Ask before `discard` frees space.
        cause = why_full(self.store.folder, error.__cause__ or error) or error
        self.store.discard(step)
        newest = self.store.latest()
        there = f"the newest checkpoint is of step {newest.step}" if newest else "there is no other checkpoint"
        self._failure = CheckpointError(f"the checkpoint of step {step} was not written: {cause}; {there}")
        self._say(f"warning: {self._failure}")
