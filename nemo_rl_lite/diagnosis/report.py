"""Findings for people: a table for each subject on a terminal, plain lines elsewhere."""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from nemo_rl_lite.diagnosis.check import Check, Finding, Status

COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIPPED: "dim"}


def show(findings: Sequence[Finding]) -> None:
    """Write them to stdout."""
    if sys.stdout.isatty():
        try:
            _show_tables(findings)
            return
        except ImportError:
            # rich is one of the packages that may be missing.
            pass
    sys.stdout.write("\n".join([*lines(findings), summary(findings)]) + "\n")


def lines(findings: Sequence[Finding]) -> list[str]:
    """One line a check, and those that are not ok with more below it."""
    width = max((len(finding.check.name) for finding in findings), default=0)
    text: list[str] = []
    for subject, group in groupby(findings, key=lambda finding: finding.subject):
        text.append(subject)
        for finding in group:
            check = finding.check
            text.append(f"  {check.status:<7}  {check.name:<{width}}  {check.found}{aside(check)}")
            text += [f"  {'':<7}  {'':<{width}}  {more}" for more in details(check)]
    return text


def details(check: Check) -> list[str]:
    """What is wanted, the fix and what is off, of a check that is not as it should be."""
    if check.status is Status.OK:
        return []
    parts = {"wanted": check.wanted, "fix": check.fix, "off": check.off}
    return [f"{label}: {value}" for label, value in parts.items() if value]


def aside(check: Check) -> str:
    """What is wanted, behind what was found, where that is as it should be but does not say it itself."""
    says_it = not check.wanted or check.wanted in check.found
    return "" if check.status is not Status.OK or says_it else f" (wanted: {check.wanted})"


def summary(findings: Sequence[Finding]) -> str:
    """One line for all."""
    counts = Counter(finding.check.status for finding in findings)
    told = ", ".join(f"{counts[status]} {status}" for status in Status)
    verdict = "mend what fails first" if counts[Status.FAIL] else "nothing was found that stops a run"
    return f"{told}: {verdict}"


def _show_tables(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    width = max((len(finding.check.name) for finding in findings), default=0)
    for subject, group in groupby(findings, key=lambda finding: finding.subject):
        table = Table(title=subject, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(width=len(Status.SKIPPED))
        table.add_column(width=min(width, 30))
        table.add_column(overflow="fold")
        for finding in group:
            check = finding.check
            found = Text(check.found).append(aside(check), style="dim")
            for more in details(check):
                label, _, value = more.partition(": ")
                found.append(f"\n{label}: ", style="bold").append(value)
            style = COLOURS[check.status]
            table.add_row(Text(check.status, style=style), check.name, found)
        console.print(table)
        console.print()
    console.print(summary(findings))
