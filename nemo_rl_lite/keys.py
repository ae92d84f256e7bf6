"""`nrl-lite keys WORD ...`: print the keys whose names, or otherwise descriptions, contain all words."""

import argparse
import difflib
import sys
import textwrap
from collections.abc import Sequence

from nemo_rl_lite.config.reference import Entry, Reference

_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="nrl-lite keys", description=__doc__)
    parser.add_argument("words", metavar="WORD", nargs="+", help="part of a key, such as rollouts or policy.lr")
    words = [word.casefold() for word in parser.parse_args(arguments).words]
    entries = list(Reference.of_package().entries())
    found = [one for one in entries if _has(one.key, words)] or [one for one in entries if _has(one.sentence, words)]
    if not found:
        near = difflib.get_close_matches(words[0], [one.key.rpartition(".")[2] for one in entries], n=1)
        hint = f"; did you mean {near[0]}?" if near else "; `nrl-lite train --cfg job` prints all"
        sys.stderr.write(f"nrl-lite keys: no key has {' and '.join(words)}{hint}\n")
        sys.exit(1)
    sys.stdout.write("\n".join(map(shown, found)) + "\n")


def _has(text: str, words: Sequence[str]) -> bool:
    return all(word in text.casefold() for word in words)


def shown(entry: Entry) -> str:
    kind, default, sentence = map(_plain, (entry.kind, entry.default, entry.sentence))
    lines = [f"{kind}; default: {default}", textwrap.fill(sentence, _WIDTH)]
    return f"{entry.key}\n{textwrap.indent(chr(10).join(lines), '    ')}"


def _plain(markdown: str) -> str:
    return markdown.replace("`", "").replace("\\|", "|").replace("&lt;", "<")


if __name__ == "__main__":
    main()
