"""`python -m nemo_rl_lite.train [group=file ...] [key.path=value ...]`: compose, validate, run."""

import sys
from collections.abc import Sequence

from nemo_rl_lite.run.command import launch


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line.

    Exit status: 0 done, 1 failed, 2 bad configuration or data, 3 a worker failed, 4 a refit failed, 75 stopped with a
    checkpoint, 130 interrupted; of a sweep, that of the first job that failed.
    """
    launch(sys.argv[1:] if arguments is None else list(arguments))


if __name__ == "__main__":
    main()
