"""Finds free ports at which workers meet. Imports nothing heavy."""

import random
import socket
from contextlib import suppress

# Above Ray's default ports, and below those that kernels use for outgoing connections.
LASTING_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A free port of this machine that the kernel does not use for outgoing connections, because it is opened later.

    Raises:
        OSError: there is no free port.
    """
    for port in [*random.sample(LASTING_PORTS, 20), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise OSError("no free port on this host")
