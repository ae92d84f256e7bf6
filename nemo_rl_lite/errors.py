"""Errors that a user can act on, with their exit statuses."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Replaces secrets in files.
HIDDEN = "REDACTED"


class LauncherError(Exception):
    """Base of all errors that are shown without a traceback."""

    exit_status = 1


@dataclass(frozen=True)
class Violation:
    """A problem of a configuration: key, value, violated rule, fix, and place in a file."""

    key: str
    value: object
    rule: str
    fix: str
    place: str | None = None

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {self.value!r}"
        where = "" if self.place is None else f"  ({self.place})"
        return f"{self.key}{shown}{where}\n      {self.rule}\n      fix: {self.fix}"


class ConfigError(LauncherError):
    """All problems of a configuration."""

    exit_status = 2

    def __init__(self, violations: Sequence[Violation]):
        self.violations = list(violations)
        super().__init__(str(self))

    def __str__(self) -> str:
        count = len(self.violations)
        lines = [f"configuration error: {count} problem{'s' if count != 1 else ''} found"]
        lines += [f"  {number}. {violation}" for number, violation in enumerate(self.violations, start=1)]
        return "\n".join(lines)


class DataError(LauncherError):
    """A dataset cannot be read. The message names file, row and problem."""

    exit_status = 2


class UsageError(LauncherError):
    """A command's flag is invalid. The message names the flag."""

    exit_status = 2


class HostMemoryError(LauncherError):
    """An offload or a save needs more host memory than is free."""


class CheckpointError(LauncherError):
    """A checkpoint cannot be written or read. The message names the folder; older checkpoints are unchanged."""


class TrainingError(LauncherError):
    """Training makes no progress. The message names the symptom and the key that limits it."""


class CallbackError(LauncherError):
    """A user's callback raised. The message names the callback, the error and its line."""


class RunStopped(LauncherError):
    """The run was stopped before its last step, with a checkpoint. The same command resumes it."""

    exit_status = 75

    def __init__(self, step: int, total: int, reason: str, folder: str):
        resume = f"To resume, give the same command with hydra.run.dir={folder}"
        super().__init__(f"stopped after step {step} of {total}: {reason}. {resume}")


class RefitError(LauncherError):
    """A refit is incomplete. The message names the bucket and its tensors."""

    exit_status = 4


class EngineError(LauncherError):
    """A generation engine computes non-finite numbers. The message names the engine."""

    exit_status = 3


class LostTouchError(RefitError):
    """A peer of the refit died or timed out. The cause is mostly on its side."""


class WorkerError(LauncherError):
    """A worker raised or died. `cause` is one line; the worker's traceback is in `details`.

    `lost`: its process died. `is_transient`: it exceeded the time limit of a phase, or its GPU or its connection to
    others failed. A restart may help both. `raised`: the class of its exception, if any. `others_running`: some workers
    have neither finished nor failed.
    """

    exit_status = 3

    def __init__(
        self,
        worker: str,
        phase: str,
        cause: str,
        details: str = "",
        lost: bool = False,
        raised: str | None = None,
        is_transient: bool = False,
    ):
        self.worker, self.phase, self.cause, self.details = worker, phase, cause, details
        self.lost, self.raised, self.is_transient, self.others_running = lost, raised, is_transient, False
        super().__init__(f"worker error: {worker} failed in phase '{phase}': {cause}")

    def __reduce__(self) -> tuple[Any, ...]:
        kinds = self.lost, self.raised, self.is_transient
        return WorkerError, (self.worker, self.phase, self.cause, self.details, *kinds)


def printable(text: object, kept: str = "") -> str:
    """Escape control characters, except those in `kept`, so that untrusted text cannot control the terminal."""
    return "".join(one if one.isprintable() or one in kept else repr(one)[1:-1] for one in str(text))


@contextmanager
def shown_as_message(program: str) -> Iterator[None]:
    """Print an error of the block and exit with its status."""
    try:
        yield
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_status)
    except OSError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(LauncherError.exit_status)
