"""Ports that are free, for workers to meet at. Imports nothing heavy."""

import random
import socket
from contextlib import suppress

# Above Ray's own and below what kernels hand out for outgoing connections.
LASTING_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port that is free on this machine now, and not one that the kernel hands out: it is used a while later.

    Raises:
        OSError: there is none.
    """
    for port in [*random.sample(LASTING_PORTS, 20), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise OSError("no free port on this host")
