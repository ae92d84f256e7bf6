"""`nrl-lite capsule RUN [FILE]`: write one file with which the first steps of a run can be repeated and compared."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_lite.errors import shown_as_message
from nemo_rl_lite.system.machine import local_path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 written, 2 no such run, no complete step or bad arguments."""
    parser = argparse.ArgumentParser(prog="nrl-lite capsule", description=__doc__)
    parser.add_argument("run", help="a run: its folder, its name or last")
    parser.add_argument("file", type=local_path, nargs="?", help="file to write (default: capsule.json in the run)")
    parser.add_argument("--steps", type=positive_number, default=3, help="number of steps (default: %(default)s)")
    parser.add_argument(
        "--samples",
        type=positive_number,
        default=8,
        help="whole samples per rollout; others as digests (default: %(default)s)",
    )
    given = parser.parse_intermixed_args(arguments)
    with shown_as_message("nrl-lite capsule"):
        from nemo_rl_lite.observability.runs import find_run
        from nemo_rl_lite.run.capsule import CAPSULE_FILE, make

        folder = find_run(given.run)
        made = make(folder, given.steps, given.samples)
        file: Path = given.file or folder / CAPSULE_FILE
        file.write_text(json.dumps(made) + "\n")
        # Prompts and the configuration may be private.
        file.chmod(0o640)
        size, steps = file.stat().st_size / 1e3, len(made["steps"]) - 1
        sys.stdout.write(f"{file} ({size:.0f} kB, {steps} steps); to repeat them: nrl-lite rerun {file}\n")


def positive_number(text: str) -> int:
    """Parse a positive number. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


if __name__ == "__main__":
    main()
