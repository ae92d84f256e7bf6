"""Paths that a command line names."""

from argparse import ArgumentTypeError
from pathlib import Path


def local_path(text: str) -> Path:
    """The path that an argument names, without `~`, which a shell leaves in `--output=~/x`. For argparse's `type`.

    Raises:
        ArgumentTypeError: it is an address, or names the home of nobody.
    """
    if "://" in text:
        raise ArgumentTypeError(f"{text} is an address, and a path of this machine is needed")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ArgumentTypeError(f"{text}: {error}") from None
