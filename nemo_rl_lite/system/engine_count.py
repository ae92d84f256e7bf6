"""Number of engines that a user requests for a run: the file `engines` in the run's folder."""

from pathlib import Path

ENGINES_FILE = "engines"


def request_engines(folder: Path, count: int) -> None:
    """Ask the run in a folder for `count` engines. Raises OSError."""
    (folder / ENGINES_FILE).write_text(f"{count}\n")


def forget_engines(folder: Path) -> None:
    """Remove the request to an earlier run in the folder."""
    (folder / ENGINES_FILE).unlink(missing_ok=True)


def requested_engines(folder: Path) -> int | None:
    """Return the requested number; None without a request. Any thread may call this."""
    try:
        return int((folder / ENGINES_FILE).read_text())
    except (OSError, ValueError):
        return None
