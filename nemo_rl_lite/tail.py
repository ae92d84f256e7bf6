"""`nrl-lite tail RUN`: follow the console output of a run until it ends.

RUN is a folder, the name of a run below outputs/ (the newest of that name), or `last`. Ctrl-C ends only this command.
"""

import argparse
import sys
from collections.abc import Sequence

from nemo_rl_lite.errors import LauncherError, shown_as_message
from nemo_rl_lite.system.stopping import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 the run is done or stopped, 1 failed or lost, 2 no such run, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="nrl-lite tail", description=__doc__)
    parser.add_argument("run", metavar="RUN", nargs="?", default="last", help="default: last")
    parser.add_argument("-n", type=int, default=10, metavar="N", help="start with the last N lines (default: 10)")
    given = parser.parse_args(arguments)
    with shown_as_message("nrl-lite tail"):
        from nemo_rl_lite.observability.runs import find_run
        from nemo_rl_lite.run.following import ending, say_now, tail

        try:
            state = tail(find_run(given.run), given.n)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        if state.state in ("failed", "lost"):
            raise LauncherError(ending(state))
        say_now(ending(state))


if __name__ == "__main__":
    main()
