"""`python -m nemo_rl_lite.doctor [--json] [--imports]`: what this machine has and lacks for runs."""

# So that an older Python gets as far as being told of.
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

EPILOG = """Each line is ok, warn (runs work, something is off or slow), fail (runs that this machine is for do not
work) or skipped (does not matter here), with what was found, what is wanted, how to mend it, and what is off
meanwhile. Nothing is changed. Exit status: 0 where nothing fails, 1 where something does, 2 for wrong arguments.
docs/troubleshooting.md goes by error message."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exit status: 0 nothing fails, 1 something does, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite doctor", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="a list for machines on stdout, and nothing else")
    parser.add_argument(
        "--imports", action="store_true", help="also import what a run's processes import (a minute or more)"
    )
    given = parser.parse_args(arguments)
    if sys.version_info < (3, 12):  # noqa: UP036 - from a checkout it is run with whatever Python there is
        sys.exit(f"Python 3.12 is needed, and this is {sys.version.split()[0]}; fix: bash scripts/install.sh")
    # An older Python cannot read the rest.
    from nemo_rl_lite.diagnosis.check import as_data, failed
    from nemo_rl_lite.diagnosis.diagnose import diagnose
    from nemo_rl_lite.diagnosis.report import show

    if given.imports:
        sys.stderr.write("importing what a run's processes import, one after the other: a minute or more ...\n")
    findings = diagnose(given.imports)
    if given.json:
        sys.stdout.write(json.dumps(as_data(findings), indent=2) + "\n")
    else:
        show(findings)
    sys.exit(1 if failed(findings) else 0)


if __name__ == "__main__":
    main()
