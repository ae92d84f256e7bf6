"""asyncio: the event loop of a notebook, which runs while a cell does."""

from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden_event_loop() -> Iterator[None]:
    """Let the block call `asyncio.run`, which asyncio refuses in a thread whose event loop is running. That loop waits
    for the block, as for any other code of a cell."""
    loop = events._get_running_loop()
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(loop)
