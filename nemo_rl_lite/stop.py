"""`nrl-lite stop RUN`: stop a run after its current step, with a checkpoint, from any machine that sees its folder.

RUN is a folder, the name of a run below outputs/ (the newest of that name), or `last`. The command waits until the run
has ended. A Slurm job is not requeued. The training command with the run's folder resumes the run. Stopping a job of a
sweep ends the sweep.
"""

import argparse
import sys
from collections.abc import Sequence

from nemo_rl_lite.errors import LauncherError, shown_as_message
from nemo_rl_lite.system.stopping import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 the run has ended, 1 it has not or failed, 2 no such run, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="nrl-lite stop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a folder, a name, or last")
    parser.add_argument("--now", action="store_true", help="stop at once, without a checkpoint of the current step")
    parser.add_argument("--timeout", type=float, metavar="S", help="wait at most this many seconds (default: no limit)")
    given = parser.parse_args(arguments)
    with shown_as_message("nrl-lite stop"):
        from nemo_rl_lite.observability.runs import find_run, read_state
        from nemo_rl_lite.run.following import ending, say_now, shown_path, stop

        folder = find_run(given.run)
        if not (before := read_state(folder)).is_running:
            sys.stdout.write(f"not running, {ending(before)}\n")
            return
        try:
            state = stop(folder, given.now, say_now, given.timeout)
        except KeyboardInterrupt:
            sys.stderr.write(f"\nthe request stays: {shown_path(folder)} ends without this command\n")
            sys.exit(INTERRUPTED)
        if state.is_running:
            raise LauncherError(f"{shown_path(folder)} has not ended within {given.timeout:g} s; the request stays")
        if state.state in ("failed", "lost"):
            raise LauncherError(ending(state))
        sys.stdout.write(f"{ending(state)}\n")


if __name__ == "__main__":
    main()
