"""A thread in which engines serve while the main thread trains."""

import asyncio
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager

import pytest

from nemo_rl_lite.rollout.queue import BackgroundLoop


@asynccontextmanager
async def serving():
    yield "served"


async def later(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@pytest.fixture
def thread():
    background = BackgroundLoop("own", serving)
    assert background.start() == "served"
    yield background
    background.close()
    assert not background._thread.is_alive()


def test_what_the_look_raises_ends_the_wait_and_the_work(thread):
    cancelled = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    def look() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        thread.wait(work(), look)
    assert thread.wait(later(0.01), lambda: None) == "done" and cancelled


def test_a_thread_that_has_ended_is_an_error_and_no_hang(thread):
    with pytest.raises((RuntimeError, CancelledError)):
        thread.wait(later(60), thread.close)


def test_what_fails_at_the_start_is_raised_there():
    @asynccontextmanager
    async def broken():
        raise OSError("no port")
        yield

    with pytest.raises(OSError, match="no port"):
        BackgroundLoop("own", broken).start()
