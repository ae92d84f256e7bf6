"""Errors that a user can act on, with their exit statuses. Imports nothing heavy."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class LauncherError(Exception):
    """The base of all errors that are shown as a message without a traceback."""

    exit_status = 1


@dataclass(frozen=True)
class Violation:
    """One problem of a configuration: the key, its value, the rule it violates, and the fix."""

    key: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {self.value!r}"
        return f"{self.key}{shown}\n      {self.rule}\n      fix: {self.fix}"


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
    """A dataset cannot be read. The message names the file, the row and the problem."""

    exit_status = 2


class HostMemoryError(LauncherError):
    """There is too little host memory for an offload. The message says what is needed and what is free."""


class CheckpointError(LauncherError):
    """A checkpoint cannot be written or read. The message names the folder; older checkpoints are unchanged."""


class TrainingError(LauncherError):
    """Training makes no progress. The message says what was seen, and which key limits it."""


class CallbackError(LauncherError):
    """A user's callback raised; its own error is the cause. The message names the callback, the error and its line."""


class RunStopped(LauncherError):
    """The run was asked to end before its last step. It is saved, and the same command resumes it."""

    exit_status = 75

    def __init__(self, step: int, total: int, reason: str, folder: str):
        resume = f"To resume, give the same command with hydra.run.dir={folder}"
        super().__init__(f"stopped after step {step} of {total}: {reason}. {resume}")


class RefitError(LauncherError):
    """New weights did not arrive completely. The message names the bucket and its tensors."""

    exit_status = 4


class EngineError(LauncherError):
    """A generation engine computes nonsense. The message names the engine."""

    exit_status = 3


class LostTouchError(RefitError):
    """A peer of the refit died, or did not answer in time; the cause is mostly on its side."""


class WorkerError(LauncherError):
    """A worker raised or died. `cause` is one line; the worker's traceback is in `details`.

    `lost`: its process died, so that a restart may help; `raised`: otherwise the class of its exception;
    `others_running`: some workers have neither finished nor failed.
    """

    exit_status = 3

    def __init__(
        self, worker: str, phase: str, cause: str, details: str = "", lost: bool = False, raised: str | None = None
    ):
        self.worker, self.phase, self.cause, self.details = worker, phase, cause, details
        self.lost, self.raised, self.others_running = lost, raised, False
        super().__init__(f"worker error: {worker} failed in phase '{phase}': {cause}")


def printable(text: object, kept: str = "") -> str:
    """Escape a model's or a user's text for a terminal, except for the characters `kept`, so that it cannot move the
    cursor, or change colours or the clipboard."""
    return "".join(one if one.isprintable() or one in kept else repr(one)[1:-1] for one in str(text))


@contextmanager
def shown_as_message(program: str) -> Iterator[None]:
    """Print a user's error in the block of a command line, and exit with its status."""
    try:
        yield
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_status)
    except OSError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(LauncherError.exit_status)
