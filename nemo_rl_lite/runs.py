"""`nrl-lite runs [FOLDER ...]`: list the runs below folders (default: outputs), newest first."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_lite.errors import shown_as_message
from nemo_rl_lite.system.machine import local_path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="nrl-lite runs", description=__doc__)
    parser.add_argument("folders", metavar="FOLDER", type=local_path, nargs="*", help="default: outputs")
    parser.add_argument("-n", type=int, default=30, metavar="N", help="the N newest runs; 0: all (default: 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    given = parser.parse_args(arguments)
    if missing := next((one for one in given.folders if not one.is_dir()), None):
        parser.error(f"{missing}: no such folder")
    with shown_as_message("nrl-lite runs"):
        from rich.console import Console

        from nemo_rl_lite.observability.runs import OUTPUTS, read_states
        from nemo_rl_lite.run.following import runs_table

        folders: list[Path] = given.folders or [OUTPUTS]
        states = read_states(folders)
        shown = states[: given.n or None]
        if given.json:
            sys.stdout.write("".join(f"{json.dumps(one.as_json())}\n" for one in shown))
            return
        console = Console(highlight=False)
        if not console.is_terminal:
            # One line per run, for programs.
            console.width = 1000
        if shown:
            console.print(runs_table(shown))
        else:
            sys.stdout.write(f"no run below {', '.join(map(str, folders))}\n")
        if older := len(states) - len(shown):
            sys.stdout.write(f"and {older} older (-n 0 shows all)\n")


if __name__ == "__main__":
    main()
