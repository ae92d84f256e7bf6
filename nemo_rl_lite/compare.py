"""`nrl-lite compare BASE ... vs NEW ...`: say whether new runs are better than base runs.

Each name is a run or an evaluation: a folder, a run's name, or a folder of runs, of which all count. Runs of a group
should differ only in their seed. The runs are paired by held-out problem, after the last step that all have validated.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from nemo_rl_lite.errors import shown_as_message
from nemo_rl_lite.system.machine import local_path

_BETWEEN = "vs"
# Number of differing keys that the command shows.
_KEYS = 12


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 compared, 2 bad arguments."""
    parser = argparse.ArgumentParser(
        prog="nrl-lite compare",
        usage="nrl-lite compare BASE ... vs NEW ... [--step STEP] [--json]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="two runs need no `vs`")
    parser.add_argument("--step", type=int, help="compare after this step (default: the last common one)")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    given = parser.parse_args(arguments)
    words = given.runs if len(given.runs) != 2 else [given.runs[0], _BETWEEN, given.runs[1]]
    if words.count(_BETWEEN) != 1 or _BETWEEN in (words[0], words[-1]):
        parser.error(f"write the base runs, `{_BETWEEN}`, and the new runs")
    with shown_as_message("nrl-lite compare"):
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        from nemo_rl_lite.report.comparison import compare, rows, sentences

        place = words.index(_BETWEEN)
        base, new = _folders(words[:place]), _folders(words[place + 1 :])
        found = compare(base, new, given.step)
        if given.json:
            kept = [
                {
                    "quantity": one.quantity.name,
                    "base": one.base,
                    "new": one.new,
                    "difference": one.new - one.base,
                    "interval": None if one.difference is None else [one.difference.low, one.difference.high],
                    "verdict": one.verdict,
                    "problems": one.problems,
                    "needed": None if one.difference is None else one.difference.needed,
                }
                for one in found.compared
            ]
            names = {"base": list(map(str, base)), "new": list(map(str, new))}
            kept = {**names, "step": found.step, "keys": found.keys, "compared": kept}
            sys.stdout.write(f"{json.dumps(kept, default=str)}\n")
            return
        console = Console(highlight=False)
        console.print(f"base: {len(base)} run(s), new: {len(new)} run(s), after step {found.step}")
        for key, (before, now) in islice(found.keys.items(), _KEYS):
            console.print(escape(f"  {key}: {before} -> {now}"))
        if (more := len(found.keys) - _KEYS) > 0:
            console.print(f"  and {more} more keys")
        table = Table("quantity", "base", "new", "difference", "95 % interval", "verdict")
        for row in rows(found):
            table.add_row(*row)
        console.print(table)
        for sentence in sentences(found, (len(base), len(new))):
            console.print(escape(sentence))


def _folders(words: Sequence[str]) -> list[Path]:
    """Return the folders that words name, each once. Raises NoRunError: there is no such run."""
    from nemo_rl_lite.observability.runs import find_run, is_run, runs_below

    found: dict[Path, None] = {}
    for word in words:
        folder = local_path(word)
        if not folder.is_dir():
            below = [find_run(word)]
        elif is_run(folder) or (folder / "rollouts").is_dir():
            below = [folder]
        else:
            below = runs_below(folder) or [find_run(word)]
        found.update(dict.fromkeys(one.resolve() for one in below))
    return list(found)


if __name__ == "__main__":
    main()
