"""`nrl-lite tail RUN`: the console of a run, as it is written, until the run ends.

RUN is a run's folder, the name of a run below outputs/ (of several the newest), or `last`. Ctrl-C ends only this.
"""

import argparse
import sys
from collections.abc import Sequence

from nemo_rl_lite.errors import LauncherError, shown_as_message
from nemo_rl_lite.system.stopping import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exit status: 0 the run is done or was stopped, 1 it failed or is lost, 2 there is no such run,
    130 interrupted."""
    parser = argparse.ArgumentParser(prog="nrl-lite tail", description=__doc__)
    parser.add_argument("run", metavar="RUN", nargs="?", default="last", help="default: last")
    parser.add_argument("-n", type=int, default=10, metavar="N", help="begin with the last N lines (default: 10)")
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
