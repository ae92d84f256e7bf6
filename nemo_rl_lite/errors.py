"""The errors a user can act on, and the exit status of each. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass


class LauncherError(Exception):
    """Base of every error that is shown as a message instead of a traceback."""

    exit_status = 1


@dataclass(frozen=True)
class Violation:
    """One thing wrong with the configuration: where, what is there, what must hold, how to mend it."""

    key: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {self.value!r}"
        return f"{self.key}{shown}\n      {self.rule}\n      fix: {self.fix}"


class ConfigError(LauncherError):
    """Everything wrong with a configuration, at once."""

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
    """A dataset that cannot be read: names the file, the row and what is wrong there."""

    exit_status = 2


class HostMemoryError(LauncherError):
    """Too little host memory for what is to leave the device: says what is needed and what is free."""


class CheckpointError(LauncherError):
    """A checkpoint that could not be written or read: names the folder. Older ones are as they were."""


class TrainingError(LauncherError):
    """Training that leads nowhere: says what was seen, and what limits it."""


class RunStopped(LauncherError):
    """A run that was asked to end before its last step: everything is saved, and the same command goes on."""

    exit_status = 75

    def __init__(self, step: int, total: int, reason: str, folder: str):
        go_on = f"The same command goes on from there, with hydra.run.dir={folder}"
        super().__init__(f"stopped after step {step} of {total}: {reason}. {go_on}")


class RefitError(LauncherError):
    """New weights did not arrive whole: names the bucket and its tensors."""

    exit_status = 4


class LostTouchError(RefitError):
    """A peer of the refit is gone, or did not answer in time: the cause is mostly with it."""


class WorkerError(LauncherError):
    """A worker raised or died. `cause` is one line; the worker's traceback is in `details`.

    `lost`: its process is gone, so that a new one may do better; `raised`: the class of what it raised otherwise;
    `others_go_on`: some workers have neither finished nor failed.
    """

    exit_status = 3

    def __init__(
        self, worker: str, phase: str, cause: str, details: str = "", lost: bool = False, raised: str | None = None
    ):
        self.worker, self.phase, self.cause, self.details = worker, phase, cause, details
        self.lost, self.raised, self.others_go_on = lost, raised, False
        super().__init__(f"worker error: {worker} failed in phase '{phase}': {cause}")
