"""Makes all checks of this machine, and prints them."""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from nemo_rl_lite.diagnosis import gpus, host, network, packages
from nemo_rl_lite.diagnosis.check import FAIL, OK, Check, CheckStatus, Machine, examine, run_within

LIMIT_S = 20.0
COLOURS = {"ok": 32, "warn": 33, "fail": 31, "skipped": 2}


def diagnose() -> list[Check]:
    """Check this machine, its Python environment and the current folder within about 2 * `LIMIT_S` seconds."""
    (answer,) = run_within(LIMIT_S, [gpus.read_gpus])
    found, trouble = ((), f"nvidia-smi: {answer or 'no answer'}") if isinstance(answer, Exception) else answer
    machine = Machine(found, trouble, packages.environment_kind())
    return examine(machine, packages.CHECKS | gpus.CHECKS | host.CHECKS | network.CHECKS, LIMIT_S)


def lines(checks: Sequence[Check], coloured: bool = False) -> list[str]:
    """One line a check; what is wanted, the fix and what is off follow where it is not ok. The last line counts."""
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
