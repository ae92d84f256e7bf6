"""Runs checks of this machine concurrently, within a time limit even where a driver or a file system never answers, and
prints them."""

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
    """Runs work, but something is off or slow."""
    FAIL = "fail"
    """Runs that this machine and its environment are for will not work."""
    SKIPPED = "skipped"
    """The check does not apply here."""


OK, WARN, FAIL, SKIPPED = CheckStatus
COLOURS = {OK: 32, WARN: 33, FAIL: 31, SKIPPED: 2}


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis. `off`: the feature that does not work, or is slow, until it is fixed."""

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
    """A check that is ok if it `fits`, and `bad` otherwise."""
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
    """The compute capability, (9, 0); empty where it is unknown."""


@dataclass(frozen=True)
class Machine:
    """Facts that several checks read."""

    gpus: Sequence[Gpu] = ()
    gpu_trouble: str = ""
    """Why nvidia-smi named no GPU; empty where there is no nvidia-smi."""
    kind: str = ""
    """`cpu` or `gpu`: what the Python environment is for; empty where it is unknown."""
    system: Path = Path("/")
    """Where /proc, /sys and /dev are."""


type Look = Callable[[Machine], Iterable[Check]]


def run_within[Result](limit_s: float, calls: Sequence[Callable[[], Result]]) -> list[Result | Exception]:
    """Run `calls` concurrently and return the result or error of each: TimeoutError after `limit_s` seconds. Threads
    are daemons, so a call that hangs does not keep the process alive."""
    results: list[Result | Exception] = [TimeoutError() for _ in calls]

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # the caller decides what an error means
            results[index] = error

    threads = [Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return list(results)


def examine(machine: Machine, looks: Mapping[str, Sequence[Look]], limit_s: float) -> list[Check]:
    """Run all checks, listed by subject, and return their lines in the same order. One that raises or hangs gets a line
    that says so."""
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
    """One line a check, with more lines where it is not ok. The last line counts."""
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
    verdict = "fix what fails first" if counts[FAIL] else "nothing was found that stops a run"
    return [*text, f"{', '.join(f'{counts[status]} {status}' for status in CheckStatus)}: {verdict}"]


def show(checks: Sequence[Check]) -> None:
    sys.stdout.write("\n".join(lines(checks, sys.stdout.isatty())) + "\n")
