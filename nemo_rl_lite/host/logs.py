"""What the processes of a run write to their log files."""

import logging


def log_to_stderr() -> None:
    """Messages from INFO on; nothing where the process has been told so before."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s][%(levelname)s] %(message)s")
