"""asyncio: the running event loop of a notebook."""

from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden_event_loop() -> Iterator[None]:
    """Allow `asyncio.run` in the block, although the thread's event loop is running. That loop waits for the block."""
    loop = events._get_running_loop()
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(loop)
