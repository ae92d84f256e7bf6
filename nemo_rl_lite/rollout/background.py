"""An event loop in a thread of its own, in which engines serve while the main thread trains."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

# Seconds between two looks of the main thread at what it waits for.
LOOK_S = 0.25
# Seconds that the thread has to end.
_END_S = 10.0


class Background[Served]:
    """Within the thread, `serving()` is entered once; coroutines that the main thread submits run inside of it."""

    def __init__(self, name: str, serving: Callable[[], AbstractAsyncContextManager[Served]]):
        self._serving = serving
        self._started: Future[Served] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Served:
        """Start the thread; returns what serves in it. Raises what `serving()` raises."""
        self._thread.start()
        return self._started.result()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def submit[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the thread."""
        if self._loop is None:
            raise RuntimeError("the thread has not started")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait[Result](self, coroutine: Coroutine[Any, Any, Result], look: Callable[[], None]) -> Result:
        """Return the result of a coroutine that runs in the thread; `look` is called several times a second, and what
        it raises ends the wait."""
        future = self.submit(coroutine)
        try:
            while not _is_done(future):
                if not self.is_running:
                    raise RuntimeError(f"the thread {self._thread.name!r} has ended")
                look()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def close(self) -> None:
        """End the thread and all that runs in it."""
        if self._loop is not None and self._main is not None and self.is_running:
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # whatever it is, it belongs to the thread that waits for the start
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        async with self._serving() as served:
            self._started.set_result(served)
            await asyncio.Event().wait()


def _is_done(future: Future[Any]) -> bool:
    """Whether it is done, now or within a moment."""
    try:
        future.exception(LOOK_S)
    except TimeoutError:
        return False
    return True
