"""Stores a run's checkpoints so that each is complete or absent, whenever the process ends. Imports nothing heavy.

A checkpoint is a folder `step-00000120` with what the run wrote and `checkpoint.json`, which has a digest of every file
and of itself: a bit that flipped on a disk changes weights without an error anywhere else. It is written under a name
that begins with a dot, synced to the disk, and then renamed; `latest` names the newest. Older ones stay until the new
one is complete. `Checkpoints` saves them while a run trains.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.system.machine import why_full

log = logging.getLogger(__name__)
RECORD, PREFIX = "checkpoint.json", "step-"
LATEST, _REPLACED = "latest", ".replaced-"
# The policy's part of a checkpoint's folder.
POLICY = "policy"

# Reading a file and computing its digest release the interpreter's lock; disks and CPUs both have room for this many.
_THREADS = 8

# Names that a network file system gives to files that were removed while open.
_REMOVED = ".nfs"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `record` describes the run, `metrics` are those of the validation at its step, and `files`
    are the digests of its files (None in a checkpoint from before digests)."""

    path: Path
    step: int
    metrics: Mapping[str, float]
    record: Mapping[str, Any]
    files: Mapping[str, str] | None


@dataclass(frozen=True)
class Retention:
    """The number of newest checkpoints, and of best ones by `metric`, that are kept."""

    newest: int
    best: int
    metric: str | None
    higher_is_better: bool


class CheckpointStore:
    """The folder of a run's checkpoints."""

    def __init__(self, folder: Path, retention: Retention):
        self.folder, self._retention = folder, retention

    def begin(self, step: int) -> Path:
        """Make an empty folder for the checkpoint of `step`, under a name that no reader looks for.

        Raises:
            CheckpointError: the folder cannot be made.
        """
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
        digests: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Complete the checkpoint that was begun, and remove those that are not kept. `digests`: known ones, by the
        file's path in the checkpoint.

        Raises:
            CheckpointError: it was not written completely; older checkpoints are unchanged.
        """
        unfinished, target = self._unfinished(step), self.folder / folder_name(step)
        known = dict(digests or {})
        try:
            others = [file for file in files_below(unfinished) if file.relative_to(unfinished).as_posix() not in known]
            done = Checkpoint(target, step, dict(metrics), dict(record), known | digests_of(unfinished, others))
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
            log.warning("the checkpoint of step %d is complete, but older ones were not tidied up: %s", step, error)
        return done

    def tidy(self) -> None:
        """Remove the unfinished checkpoints of a killed run, and restore one that was being replaced where the new one
        is missing."""
        for replaced in self.folder.glob(f"{_REPLACED}{PREFIX}*"):
            target = self.folder / replaced.name.removeprefix(_REPLACED)
            if load(target) is None and load(replaced) is not None:
                shutil.rmtree(target, ignore_errors=True)
                replaced.rename(target)
            shutil.rmtree(replaced, ignore_errors=True)
        for unfinished in self.folder.glob(f".{PREFIX}*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write `metrics` into the checkpoint of `step`, if there is one."""
        target = self.folder / folder_name(step)
        found = load(target)
        if found is not None:
            try:
                write_record(target, replace(found, metrics=dict(metrics)))
            except OSError as error:
                raise CheckpointError(f"the metrics of step {step} were not written to {target}: {error}") from error

    def discard(self, step: int) -> None:
        """Remove the checkpoint that was begun."""
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def complete(self) -> list[Checkpoint]:
        """All complete checkpoints, the oldest first. Their files are not read."""
        found = map(load, self._folders())
        return sorted((one for one in found if one is not None), key=lambda one: one.step)

    def newest_whole(self) -> Checkpoint | None:
        """The newest checkpoint, with its files verified; None where there is none.

        Raises:
            CheckpointError: it is damaged. The message names the next older checkpoint that is whole.
        """
        folders = self._folders()
        if not folders:
            return None
        *older, newest = folders
        try:
            return verified(newest)
        except CheckpointError as error:
            fallback = None
            for path in reversed(older):
                with suppress(CheckpointError):
                    fallback = verified(path)
                    break
            offer = f"the newest one that is whole is {fallback.path}" if fallback else "no older one is whole"
            fix = f"fix: restore it, or move it away to resume {'from there' if fallback else 'from the start'}"
            raise CheckpointError(f"{error}; {offer}; {fix}") from error

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".{folder_name(step)}"

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob(f"{PREFIX}*"))

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint."""
        checkpoints = self.complete()
        return checkpoints[-1] if checkpoints else None

    def best(self, count: int = 1) -> list[Checkpoint]:
        """The `count` checkpoints with the best metric, the best first; of equal ones the newer first."""
        metric, sign = self._retention.metric, 1 if self._retention.higher_is_better else -1
        measured = [one for one in self.complete() if math.isfinite(one.metrics.get(metric or "", math.nan))]
        return sorted(measured, key=lambda one: (sign * one.metrics[metric or ""], one.step), reverse=True)[:count]

    def _prune(self) -> None:
        checkpoints = self.complete()
        kept = {one.path for one in checkpoints[-self._retention.newest :]}
        kept |= {one.path for one in self.best(self._retention.best)}
        for one in checkpoints:
            if one.path not in kept:
                # Rename it first, so that an interrupted removal leaves no incomplete checkpoint.
                gone = one.path.with_name(f".{one.path.name}")
                shutil.rmtree(gone, ignore_errors=True)
                one.path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


def has_any(folder: Path) -> bool:
    """Whether a run has saved there, including a replaced checkpoint that `tidy` would restore."""
    return any(path for begin in ("", _REPLACED) for path in folder.glob(f"{begin}{PREFIX}*"))


def load(path: Path) -> Checkpoint | None:
    """Read the record of the checkpoint in a folder; None where there is no complete one."""
    try:
        return read(path)
    except CheckpointError:
        return None


def read(path: Path) -> Checkpoint:
    """Read the record of the checkpoint in a folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        content = json.loads((path / RECORD).read_text())
        step, metrics, record, files = content["step"], content["metrics"], content["record"], content.get("files")
        kinds = [(step, int), (metrics, dict), (record, dict), (record.get("config", {}), dict), (files or {}, dict)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has no {RECORD} that can be read ({type(error).__name__}: {error})") from error
    own, changed = content.pop("digest", None), f"{path / RECORD} is not what was saved"
    if not all(isinstance(value, kind) for value, kind in kinds):
        raise CheckpointError(changed)
    # A checkpoint from before digests has neither.
    if (own, files) != (None, None) and own != _record_digest(content):
        raise CheckpointError(changed)
    if path.name.startswith(PREFIX) and path.name != folder_name(step):
        raise CheckpointError(f"{path} says that it is of step {step}")
    return Checkpoint(path, step, metrics, record, files)


def verified(path: Path) -> Checkpoint:
    """Read the record of the checkpoint in a folder, and all its files.

    Raises:
        CheckpointError: a file is missing, damaged, or not one of the checkpoint's.
    """
    found = read(path)
    if found.files is None:
        log.warning("%s has no digests: whether its files are as they were saved is not known", path)
        return found
    try:
        own = [file for file in files_below(path) if file.name not in (RECORD, f".{RECORD}")]
        trouble = difference(path, own, found.files)
    except OSError as error:
        trouble = f"it cannot be read: {error}"
    if trouble:
        raise CheckpointError(f"the checkpoint {path} is damaged: {trouble}")
    return found


def write_record(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the record of a checkpoint into its folder atomically. Raises OSError."""
    content: dict[str, Any] = {"step": checkpoint.step, "metrics": checkpoint.metrics, "record": checkpoint.record}
    if checkpoint.files is not None:
        content["files"] = checkpoint.files
        content["digest"] = _record_digest(content)
    unfinished = folder / f".{RECORD}"
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    # It contains the configuration.
    unfinished.chmod(0o640)
    to_disk(unfinished)
    unfinished.replace(folder / RECORD)


def _record_digest(content: Mapping[str, Any]) -> str:
    """The digest of a record, as written and as read."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def folder_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"{PREFIX}{step:08d}"


def to_disk(path: Path) -> None:
    """Sync a file or a folder to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digests_of(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 in hexadecimal of each file, by its path below `folder`. Raises OSError: a file cannot be read."""
    paths = sorted(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        names = [path.relative_to(folder).as_posix() for path in paths]
        return dict(zip(names, pool.map(_file_digest, paths), strict=True))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and its subfolders."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(_REMOVED)]


def difference(folder: Path, files: Iterable[Path], expected: Mapping[str, str]) -> str:
    """The first way in which the `files` of a folder differ from the `expected` digests; empty without one."""
    names = {path.relative_to(folder).as_posix(): path for path in files}
    if missing := sorted(expected.keys() - names.keys()):
        return f"{missing[0]} is missing"
    if foreign := sorted(names.keys() - expected.keys()):
        return f"{foreign[0]} is not one of its files"
    found = digests_of(folder, names.values())
    return next((f"{name} is not what was saved" for name in sorted(expected) if found[name] != expected[name]), "")


SaveRollouts = Callable[[Path], Mapping[str, Any]]
"""Returns what the source of rollouts needs to resume; large state goes to files in the checkpoint's folder."""


def save_none(_: Path) -> Mapping[str, Any]:
    """No-op for algorithms without rollouts."""
    return {}


class Saver(Protocol):
    """The part of a policy that saving needs."""

    def begin_save(self, folder: str) -> None: ...

    def save_is_written(self) -> bool: ...

    def finish_save(self) -> dict[str, str]:
        """Wait until it is written; returns digests of some of its files, by name."""
        ...


class Checkpoints:
    """Saves every `period` steps (0: never) and on request; writes at most one checkpoint at a time.

    A checkpoint that cannot be written is a warning, and training continues; `require` raises if the last one failed.
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
        rollouts: SaveRollouts = save_none,
    ):
        """Every checkpoint contains `record` and what `rollouts` returns. `saved`: the step that this run resumed
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

    def save_if_due(self, step: int, last: bool) -> None:
        """Save after every `period`-th step and after the last."""
        if self._period and (last or step % self._period == 0):
            self.save(step)

    def save(self, step: int) -> None:
        """Save the state after `step`, once, in the policy's training phase. Training may continue when this returns,
        overlapped with the writing. A run without a period saves where it is asked to end."""
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
        """Store the validation metrics of `step`, which decide which checkpoints are best."""
        self._measured = (step, dict(metrics))
        try:
            if step != self._writing:
                self.store.measured(step, metrics)
        except CheckpointError as error:
            self._say(f"warning: {error}")

    def wait_until_written(self) -> None:
        """Complete the current checkpoint if it is written, without waiting."""
        if self._writing is not None and self._policy.save_is_written():
            self.finish()

    def require(self) -> None:
        """Raise CheckpointError where the last checkpoint was not written."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait for the current checkpoint, and complete it."""
        step, self._writing = self._writing, None
        if step is None:
            return
        try:
            digests = {f"{POLICY}/{name}": digest for name, digest in self._policy.finish_save().items()}
            measured_at, metrics = self._measured
            saved = self.store.finish(step, metrics if measured_at == step else {}, self._record, digests)
            self.longest_save_s = max(self.longest_save_s, time.monotonic() - self._begun_s)
            log.info("checkpoint of step %d: %s", step, saved.path)
        except CheckpointError as error:
            self._fail(step, error)

    def _fail(self, step: int, error: Exception) -> None:
        # Removing what was written frees space.
        cause = why_full(self.store.folder, error.__cause__ or error) or error
        self.store.discard(step)
        newest = self.store.latest()
        there = f"the newest checkpoint is of step {newest.step}" if newest else "there is none yet"
        self._failure = CheckpointError(f"the checkpoint of step {step} was not written: {cause}; {there}")
        self._say(f"warning: {self._failure}")
