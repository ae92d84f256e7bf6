"""Run checks of this machine concurrently and print them. The time limit also holds if a driver never answers."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from threading import Thread

INSTALL = "bash scripts/install.sh"
EVERY_RUN = "every run"


class CheckStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Runs work, but a feature is missing or slow."""
    FAIL = "fail"
    """Runs will not work."""
    SKIPPED = "skipped"
    """The check does not apply here."""


OK, WARN, FAIL, SKIPPED = CheckStatus
COLOURS = {OK: 32, WARN: 33, FAIL: 31, SKIPPED: 2}


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis. `off`: the feature that does not work, or is slow, until the fix."""

    name: str
    status: CheckStatus
    found: str
    wanted: str = ""
    fix: str = ""
    off: str = ""
    subject: str = ""


def judge(
    name: str,
    fits: bool,
    found: str,
    wanted: str = "",
    fix: str = "",
    off: str = "",
    bad: CheckStatus = CheckStatus.WARN,
) -> Check:
    """Return a check that is ok if it `fits`, else `bad`."""
    return Check(name, OK, found, wanted) if fits else Check(name, bad, found, wanted, fix, off)


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it."""

    index: str
    name: str
    driver: str
    total_mib: int
    used_mib: int
    compute_mode: str
    """Default, Exclusive_Process or Prohibited."""
    capability: tuple[int, ...]
    """Compute capability such as (9, 0); empty if unknown."""


@dataclass(frozen=True)
class Machine:
    """Facts that several checks read."""

    gpus: Sequence[Gpu] = ()
    gpu_trouble: str = ""
    """Error of nvidia-smi; empty without nvidia-smi."""
    kind: str = ""
    """Kind of the Python environment, `cpu` or `gpu`; empty if unknown."""
    system: Path = Path("/")
    """Parent of /proc, /sys and /dev."""


type Look = Callable[[Machine], Iterable[Check]]


def run_within[Result](limit_s: float, calls: Sequence[Callable[[], Result]]) -> list[Result | Exception]:
    """Run `calls` concurrently. Return the result or error of each: TimeoutError after `limit_s` seconds. A call that
    hangs does not keep the process alive."""
    results: list[Result | Exception] = [TimeoutError() for _ in calls]

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # the caller handles it
            results[index] = error

    threads = [Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return list(results)


def examine(machine: Machine, looks: Mapping[str, Sequence[Look]], limit_s: float) -> list[Check]:
    """Run all checks, listed by subject, and return their results in order. A check that raises or hangs gets a
    warning."""
    named = [(subject, look) for subject, group in looks.items() for look in group]
    answers = run_within(limit_s, [lambda look=look: list(look(machine)) for _, look in named])
    checks: list[Check] = []
    for (subject, look), answer in zip(named, answers, strict=True):
        found = [_unanswered(look, answer, limit_s)] if isinstance(answer, Exception) else answer
        checks += [replace(check, subject=subject) for check in found]
    return checks


def _unanswered(look: Look, error: Exception, limit_s: float) -> Check:
    name = look.__name__.replace("_", " ")
    if isinstance(error, TimeoutError):
        fix = "see what hangs: a driver, a network or its file system"
        return Check(name, WARN, f"no answer within {limit_s:g} s", fix=fix)
    if isinstance(error, ImportError):
        return Check(name, WARN, f"not examined: {error}", fix=INSTALL)
    return Check(name, WARN, f"not examined: {type(error).__name__}: {error}", fix="report it, with this line")


def lines(checks: Sequence[Check], coloured: bool = False) -> list[str]:
    """Return one line per check, more if it is not ok, and a line with the counts."""
    width = max((len(check.name) for check in checks), default=0)
    text: list[str] = []
    for subject, group in groupby(checks, key=lambda check: check.subject):
        text.append(subject)
        for check in group:
            status = f"{check.status:<7}"
            if coloured:
                status = f"\x1b[{COLOURS[check.status]}m{status}\x1b[0m"
            fits = check.status is OK and check.wanted and check.wanted not in check.found
            text.append(f"  {status}  {check.name:<{width}}  {check.found}" + f" (wanted: {check.wanted})" * bool(fits))
            if check.status is not OK:
                parts = {"wanted": check.wanted, "fix": check.fix, "off": check.off}
                text += [f"  {'':<7}  {'':<{width}}  {label}: {value}" for label, value in parts.items() if value]
    counts = Counter(check.status for check in checks)
    verdict = "fix failures first" if counts[FAIL] else "nothing found that prevents a run"
    return [*text, f"{', '.join(f'{counts[status]} {status}' for status in CheckStatus)}: {verdict}"]


def show(checks: Sequence[Check]) -> None:
    sys.stdout.write("\n".join(lines(checks, sys.stdout.isatty())) + "\n")
