"""`nrl-lite doctor [--json]`: check this machine and its packages for runs."""

# An older Python must reach the message about its version.
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

EPILOG = """Each line is ok, warn (runs work, but slower or with a limitation), fail (runs do not work) or skipped
(does not apply here). It shows the value found, the value needed and the fix. Nothing is changed. Exit status: 0 no
check fails, 1 a check fails, 2 wrong arguments. docs/troubleshooting.md lists error messages."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="nrl-lite doctor", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="write only a JSON list to stdout")
    given = parser.parse_args(arguments)
    if sys.version_info < (3, 12):  # noqa: UP036 - a checkout may run with any Python
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
