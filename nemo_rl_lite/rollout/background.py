"""An event loop in a thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from typing import Any

# Seconds between two checks of the waiting main thread.
_LOOK_S = 0.25
# Seconds for the thread to end.
_END_S = 10.0


class BackgroundLoop[Served]:
    """An event loop in a thread. It enters `serving()` once, and runs coroutines for the main thread."""

    def __init__(self, name: str, serving: Callable[[], AbstractAsyncContextManager[Served]]):
        self._serving = serving
        self._started: Future[Served] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Served:
        """Start the thread; return what `serving()` yields. Raises what `serving()` raises."""
        self._thread.start()
        return self._started.result()

    def wait[Result](self, coroutine: Coroutine[Any, Any, Result], look: Callable[[], None]) -> Result:
        """Run a coroutine in the thread. `look` is called several times per second, and its errors end the wait."""
        future = self.post(coroutine)
        try:
            while not wait([future], _LOOK_S).done:
                if not self._thread.is_alive():
                    raise RuntimeError(f"the thread {self._thread.name!r} has ended")
                look()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def post(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the thread, without a wait."""
        if self._loop is None:
            raise RuntimeError("the thread has not started")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def end(self) -> None:
        """Leave `serving()`, and end the thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def close(self) -> None:
        """End the thread and all its coroutines."""
        if self._loop is not None and self._main is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # reaches the thread that waits for the start
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        async with self._serving() as served:
            self._started.set_result(served)
            await self._over.wait()
