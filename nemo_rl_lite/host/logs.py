"""Sets up logging in the processes of a run."""

import logging


def log_to_stderr() -> None:
    """Log messages from level INFO to stderr. A second call does nothing."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s][%(levelname)s] %(message)s")
