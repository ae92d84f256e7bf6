"""What a check finds, and how checks are made: at the same time, and each within a limit that holds even where a driver
or a file system never answers."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from threading import Thread
from typing import Any

from nemo_rl_lite.diagnosis.smi import GpuAnswer


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Runs work, but something is off or slow."""
    FAIL = "fail"
    """Runs that this machine and its environment are for will not work."""
    SKIPPED = "skipped"
    """Does not matter here."""


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    status: Status
    found: str
    wanted: str = ""
    fix: str = ""
    off: str = ""
    """The feature that is off, or slow, as it is."""


@dataclass(frozen=True)
class Machine:
    """What several checks look at."""

    gpus: GpuAnswer
    environment: Mapping[str, str]
    folder: Path
    """The current one."""
    kind: str
    """`cpu` or `gpu`: which of the two the Python environment is for."""
    system: Path = Path("/")
    """Where /proc, /sys and /dev are."""


@dataclass(frozen=True)
class Examination:
    """Some checks of one subject that are made together."""

    subject: str
    about: str
    """Names it where it gives no answer."""
    look: Callable[[Machine], Iterable[Check]]


@dataclass(frozen=True)
class Finding:
    """A check and its subject."""

    subject: str
    check: Check


class Pending[Result]:
    """A call that goes on in a thread. What hangs in it for ever does not keep the process from its end."""

    def __init__(self, call: Callable[[], Result]):
        self._call = call
        self._results: list[Result] = []
        self._errors: list[Exception] = []
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def get(self, deadline: float) -> Result:
        """Its result, or what it raised; TimeoutError where it has neither at `deadline` (of time.monotonic)."""
        self._thread.join(max(deadline - time.monotonic(), 0))
        if self._errors:
            raise self._errors[0]
        if not self._results:
            raise TimeoutError
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except Exception as error:  # it is raised again in `get`
            self._errors.append(error)


def examine(machine: Machine, examinations: Sequence[Examination], limit_s: float) -> list[Finding]:
    """All findings, in the order of the examinations, which run side by side for at most `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    pending = [(one, Pending(_looking(one, machine))) for one in examinations]
    return [
        Finding(examination.subject, check)
        for examination, answer in pending
        for check in _checks(examination, answer, deadline, limit_s)
    ]


def _looking(examination: Examination, machine: Machine) -> Callable[[], list[Check]]:
    return lambda: list(examination.look(machine))


def _checks(examination: Examination, answer: Pending[list[Check]], deadline: float, limit_s: float) -> list[Check]:
    try:
        return answer.get(deadline)
    except TimeoutError:
        found, fix = f"no answer within {limit_s:g} s", "see what hangs: a driver, a network or its file system"
    except ImportError as error:
        found, fix = f"not examined: {error}", "bash scripts/install.sh"
    except Exception as error:  # one check that breaks must not hide the others
        found, fix = f"not examined: {type(error).__name__}: {error}", ""
    return [Check(examination.about, Status.WARN, found, fix=fix)]


def gather[Result](call: Callable[[], Result], limit_s: float, otherwise: Result) -> Result:
    """What `call` returns within `limit_s` seconds, or `otherwise`."""
    try:
        return Pending(call).get(time.monotonic() + limit_s)
    except TimeoutError:
        return otherwise


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.check.status is Status.FAIL for finding in findings)


def as_data(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """For machines: one flat mapping a check, all values text."""
    return [
        {
            "subject": finding.subject,
            "name": finding.check.name,
            "status": finding.check.status.value,
            "found": finding.check.found,
            "wanted": finding.check.wanted,
            "fix": finding.check.fix,
            "off": finding.check.off,
        }
        for finding in findings
    ]
