"""`nrl-lite status RUN`: show a run's phase, progress, metrics, memory, checkpoint and problems.

RUN is a folder, the name of a run below outputs/ (the newest of that name), or `last`.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from nemo_rl_lite.errors import shown_as_message


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="nrl-lite status", description=__doc__)
    parser.add_argument("run", metavar="RUN", nargs="?", default="last", help="default: last")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    given = parser.parse_args(arguments)
    with shown_as_message("nrl-lite status"):
        from nemo_rl_lite.observability.runs import find_run, read_state
        from nemo_rl_lite.run.following import status_rows

        state = read_state(find_run(given.run))
        if given.json:
            sys.stdout.write(f"{json.dumps(state.as_json() | {'live': dict(state.live)})}\n")
            return
        rows = list(status_rows(state))
        width = max(len(name) for name, _ in rows[1:])
        for name, text in rows:
            sys.stdout.write(f"{name.ljust(width)}  {text}\n")


if __name__ == "__main__":
    main()
