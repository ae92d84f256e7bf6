"""`python -m nemo_rl_lite.report RUN [RUN ...]`: write one HTML page of one or several runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_lite.errors import shown_as_message
from nemo_rl_lite.host.machine import local_path

PAGE = "report.html"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exit status: 0 done, 1 the page cannot be written, 2 bad arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite report", description=__doc__)
    parser.add_argument("runs", metavar="RUN", type=local_path, nargs="+", help="the folder of a run, or of several")
    where = f"the file to write (default: {PAGE} in that folder, or in this one where several are named)"
    parser.add_argument("--output", metavar="FILE", type=local_path, help=where)
    given = parser.parse_args(arguments)
    with shown_as_message("nrl-lite report"):
        page = write_report([run.resolve() for run in given.runs], given.output)
    sys.stdout.write(f"{page}\n")


def write_report(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page and return its path. Of a folder that is no run's own, those below it are reported, and their
    number is printed. Raises ReportError: a folder has no run, or `output` is another file."""
    from nemo_rl_lite.run.report.page import is_page, page
    from nemo_rl_lite.run.report.record import ReportError, read_run, runs_of

    found = {given: runs_of(given) for given in runs}
    records = [read_run(run) for run in dict.fromkeys(run for below in found.values() for run in below)]
    output = output or (runs[0] / PAGE if len(found) == 1 else Path(PAGE))
    if output.is_file() and not is_page(output):
        raise ReportError(f"nrl-lite report: {output} exists and is no report: name another file, or remove it")
    if output.suffix not in (".html", ".htm") and not output.is_dir():
        raise ReportError(f"nrl-lite report: {output}: the report is a page of HTML, so name a file that ends in .html")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(records), encoding="utf-8")
    for given, below in found.items():
        if below != [given]:
            sys.stderr.write(f"runs below {given}: {len(below)}\n")
    return output


if __name__ == "__main__":
    main()
