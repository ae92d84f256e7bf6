"""Limits for clients without a key: number of connections, and time and size of request headers."""

import asyncio
import resource
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Limits on the headers of a request: seconds and bytes.
HEAD_S = 10.0
HEAD_BYTES = 256 << 10


def most_connections() -> int:
    """Return half of this process's file descriptors."""
    return max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which closes a connection whose headers are late. With too many connections it closes
    the longest waiting one."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head, self._head_bytes = False, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        waiting = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.awaits_head]
        if len(self.connections) >= most_connections() and waiting:
            oldest = min(waiting, key=lambda one: one.waits_since)
            # The connection is lost later; the next one must not choose it again.
            oldest._stop_waiting()
            oldest.transport.abort()
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def awaits_head(self) -> bool:
        return self._deadline is not None

    def _await_head(self) -> None:
        self._stop_waiting()
        # The loop's time is the same for connections that arrive together.
        self.waits_since = time.monotonic()
        self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        self._in_head, self._head_bytes = False, 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
