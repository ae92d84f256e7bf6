"""Restricts access to a run's Ray, whose ports would otherwise let anybody run code. Imports nothing heavy."""

import os
import secrets

from nemo_rl_lite.host.machine import OWN_RAY, ray_address


def close_to_others() -> None:
    """Let Ray, if this run starts it, serve only processes that know a secret made here, which its workers inherit.
    Call this before ray is imported, because ray reads these variables then. Do nothing where RAY_ADDRESS names a
    cluster, or RAY_AUTH_MODE is set."""
    if ray_address() in OWN_RAY and "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
