"""End processes of several hosts together, over a TCP connection between each two.

A process that computes with others waits in a collective when one of them is lost. Here it ends too, so that the
launcher sees the loss.
"""

import logging
import os
import socket
import threading
from collections.abc import Sequence

log = logging.getLogger(__name__)

# TCP keepalive: seconds before the first probe and between probes, and the number of lost probes that end a connection.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


def end_with_first(port: int) -> None:
    """End this process when the process that connects to `port` ends, or its machine is lost."""
    listening = socket.create_server(("", port))

    def accept() -> None:
        connection, _ = listening.accept()
        listening.close()
        _watch(connection)

    threading.Thread(target=accept, name="first-host", daemon=True).start()


def end_with_others(addresses: Sequence[tuple[str, int]]) -> None:
    """End this process when another one ends that listens at one of these addresses (`end_with_first`)."""
    for address in addresses:
        connection = socket.create_connection(address)
        threading.Thread(target=_watch, args=(connection,), name=f"host-{address[0]}", daemon=True).start()


def end_process(reason: str) -> None:
    """Log the reason and end this process without clean-up, from any thread."""
    log.error("%s, so this process ends", reason)
    logging.shutdown()
    os._exit(1)


def _watch(connection: socket.socket) -> None:
    peer = connection.getpeername()[0]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        connection.recv(1)
    except OSError as error:
        log.info("connection to %s: %s", peer, error)
    end_process(f"the process of this engine on {peer} has ended")
