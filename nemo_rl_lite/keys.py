"""Search the configuration keys by name, else by description; print type, default and description."""

import argparse
import difflib
import sys
import textwrap
from collections.abc import Sequence

from nemo_rl_lite.config.reference import Entry, entries

_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="nrl-lite keys", description=__doc__)
    parser.add_argument("words", metavar="WORD", nargs="+", help="part of a key, such as rollouts or policy.lr")
    words = [word.casefold() for word in parser.parse_args(arguments).words]
    known = list(entries())
    found = [one for one in known if _has(one.key, words)] or [one for one in known if _has(one.sentence, words)]
    if not found:
        near = difflib.get_close_matches(words[0], [one.key.rpartition(".")[2] for one in known], n=1)
        hint = f"; did you mean {near[0]}?" if near else "; `nrl-lite train --cfg job` prints all"
        sys.stderr.write(f"nrl-lite keys: no key has {' and '.join(words)}{hint}\n")
        sys.exit(1)
    sys.stdout.write("\n".join(map(shown, found)) + "\n")


def _has(text: str, words: Sequence[str]) -> bool:
    return all(word in text.casefold() for word in words)


def shown(entry: Entry) -> str:
    """Return the lines of a key: its name, range and default, sentence."""
    lines = f"{entry.kind}; default: {entry.default}\n{textwrap.fill(entry.sentence, _WIDTH)}".replace("`", "")
    return f"{entry.key}\n{textwrap.indent(lines, '    ')}"


if __name__ == "__main__":
    main()
