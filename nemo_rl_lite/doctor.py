"""`nrl-lite doctor [--json]`: check this machine and its packages for runs."""

# An older Python must get as far as the message about its version.
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

EPILOG = """Each line is ok, warn (runs work, something is off or slow), fail (runs that this machine is for do not
work) or skipped (does not apply here), with what was found, what is wanted, how to fix it, and what is off until
then. Nothing is changed. Exit status: 0 where nothing fails, 1 where something does, 2 for wrong arguments.
docs/troubleshooting.md lists error messages."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exit status: 0 nothing fails, 1 something does, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite doctor", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="write a JSON list, and nothing else, to stdout")
    given = parser.parse_args(arguments)
    if sys.version_info < (3, 12):  # noqa: UP036 - from a checkout it is run with whatever Python there is
        sys.exit(f"Python 3.12 is needed, and this is {sys.version.split()[0]}; fix: bash scripts/install.sh")
    # An older Python cannot parse these files.
    from nemo_rl_lite.diagnosis.check import CheckStatus, show
    from nemo_rl_lite.diagnosis.checks import diagnose

    checks = diagnose()
    if given.json:
        sys.stdout.write(json.dumps([{"subject": check.subject} | asdict(check) for check in checks], indent=2) + "\n")
    else:
        show(checks)
    sys.exit(any(check.status is CheckStatus.FAIL for check in checks))


if __name__ == "__main__":
    main()
