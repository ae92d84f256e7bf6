"""`nrl-lite constraints`: print the path of the tested package versions, for `pip install -c`.

Needs no other package, so it runs before they are installed.
"""

import argparse
import sys
from collections.abc import Sequence

from nemo_rl_lite.compat.versions import constraints_file


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="nrl-lite constraints", description=__doc__).parse_args(arguments)
    sys.stdout.write(f"{constraints_file()}\n")


if __name__ == "__main__":
    main()
