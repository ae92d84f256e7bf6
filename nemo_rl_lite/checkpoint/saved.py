"""One saved checkpoint: a folder with what the run wrote, and a record with a digest of every file and of itself."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_lite.checkpoint.digests import difference, files_below
from nemo_rl_lite.errors import CheckpointError

log = logging.getLogger(__name__)

RECORD, PREFIX = "checkpoint.json", "step-"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `record` describes the run, `metrics` are the last validation's at its step, and `files`
    are the digests of its files (None in one that was saved before there were digests)."""

    path: Path
    step: int
    metrics: Mapping[str, float]
    record: Mapping[str, Any]
    files: Mapping[str, str] | None


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
    # One from before there were digests has neither.
    if (own, files) != (None, None) and own != _digest(content):
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
    """Write the record of a checkpoint into its folder: the old one or the new one is there, whatever happens. Raises
    OSError."""
    content: dict[str, Any] = {"step": checkpoint.step, "metrics": checkpoint.metrics, "record": checkpoint.record}
    if checkpoint.files is not None:
        content["files"] = checkpoint.files
        content["digest"] = _digest(content)
    unfinished = folder / f".{RECORD}"
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    # It has the configuration.
    unfinished.chmod(0o640)
    to_disk(unfinished)
    unfinished.replace(folder / RECORD)


def _digest(content: Mapping[str, Any]) -> str:
    """The digest of a record, the same for what is written and for what is read."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def folder_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"{PREFIX}{step:08d}"


def to_disk(path: Path) -> None:
    """Let the disk have what was written to a file or a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
