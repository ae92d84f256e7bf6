"""RAY_ADDRESS: the Ray cluster that a run joins instead of starting its own. Imports nothing heavy."""

import os
import socket

from nemo_rl_lite.errors import ConfigError, Violation

VARIABLE = "RAY_ADDRESS"
FIX = "unset RAY_ADDRESS for a run on this machine alone, or start that cluster (ray start --head)"
# With these a run starts its own Ray.
OWN = ("", "local")
_ANSWER_LIMIT_S = 4.0


def ray_address() -> str:
    """Return what RAY_ADDRESS names; empty where it is not set, or empty."""
    return os.environ.get(VARIABLE, "")


def names_another(address: str) -> bool:
    """Return whether an address names a host and a port: `auto` is whatever runs on this machine."""
    return address not in (*OWN, "auto")


def why_unanswered(address: str) -> str:
    """Return why nothing answers at an address; empty where something does, or no host is named."""
    if not names_another(address):
        return ""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_LIMIT_S).close()
    except ValueError:
        return "is no HOST:PORT"
    except (OSError, OverflowError) as error:
        return f"does not answer: {error}"
    return ""


def check_ray_address() -> None:
    """Raise ConfigError where RAY_ADDRESS names a cluster that does not answer."""
    if rule := why_unanswered(ray_address()):
        raise ConfigError([Violation(VARIABLE, ray_address(), rule, FIX)])
