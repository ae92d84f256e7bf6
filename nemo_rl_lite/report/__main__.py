"""`nrl-lite report RUN [RUN ...]`: write one HTML page of one or several runs."""

import argparse
import sys
from collections.abc import Sequence

from nemo_rl_lite.errors import shown_as_message
from nemo_rl_lite.system.machine import local_path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 done, 1 the page cannot be written, 2 bad arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite report", description=__doc__)
    parser.add_argument(
        "runs", metavar="RUN", type=local_path, nargs="+", help="a run's folder or name, last, or a folder of runs"
    )
    where = "the file to write (default: report.html in that folder; for several runs, in the current folder)"
    parser.add_argument("--output", metavar="FILE", type=local_path, help=where)
    given = parser.parse_args(arguments)
    with shown_as_message("nrl-lite report"):
        from nemo_rl_lite.observability.runs import existing_or_run
        from nemo_rl_lite.report.page import write_report

        page = write_report([existing_or_run(run).resolve() for run in given.runs], given.output)
    sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    main()
