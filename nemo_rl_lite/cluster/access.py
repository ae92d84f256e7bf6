"""Who may give a run's Ray work: whoever can reach its ports could otherwise run code here. Imports nothing heavy."""

import os
import secrets


def close_to_others() -> None:
    """Let Ray, if this run starts it, serve only processes that know a secret made here, which its workers inherit. It
    must come before the first import of ray, which looks at these variables then. A cluster that RAY_ADDRESS names has
    rules of its own, and so has who sets RAY_AUTH_MODE."""
    if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
