"""`nrl-lite doctor [options] [group=file ...] [key.path=value ...]`: check this machine, or attack a reward.

Without overrides: check this machine and its packages for runs. With overrides, as for train: score responses that
deserve no reward by the reward of a configuration, and print those that it pays for.
"""

# An older Python must reach the message about its version.
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

EPILOG = """Each line about the machine is ok, warn (runs work, but slower or with a limitation), fail (runs do not
work) or skipped (does not apply here). It shows the value found, the value needed and the fix. Nothing is changed.
Exit status: 0 nothing found, 1 a check fails or the reward has a fault, 2 wrong arguments, configuration or data.
docs/troubleshooting.md lists error messages, docs/rewards.md the attacks."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="nrl-lite doctor", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", help="as for train: attack the reward on the problems of the data")
    parser.add_argument("--json", action="store_true", help="write only JSON to stdout")
    parser.add_argument(
        "--problems", type=int, default=4, metavar="N", help="attack the reward on the first N problems (default: 4)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=40.0,
        metavar="S",
        help="start no call of the reward after S seconds (default: 40)",
    )
    parser.add_argument(
        "--samples", metavar="FILE", help="a run's folder, or a file with prompt, response and answer: score these too"
    )
    given = parser.parse_intermixed_args(arguments)
    if sys.version_info < (3, 12):  # noqa: UP036 - a checkout may run with any Python
        sys.exit(f"Python 3.12 is needed, and this is {sys.version.split()[0]}; fix: bash scripts/install.sh")
    # An older Python cannot parse the files below, and the checks of the machine need no packages.
    if given.overrides or given.samples:
        from nemo_rl_lite.rehearsal.reward import attack_reward

        sys.exit(attack_reward(given.overrides, given.problems, given.seconds, given.samples, given.json))
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
