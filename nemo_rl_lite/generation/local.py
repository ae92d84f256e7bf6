"""An engine in this process, without Ray."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from nemo_rl_lite.generation.interface import Completion, Engine, Request

# Seconds that the engine works before it looks for new requests.
_SLICE_S = 0.05


class LocalReplica:
    """`generation.request_queue.Replica` over an engine of this process. It lives in a thread, so that the event loop
    runs while it works."""

    def __init__(self, make: Callable[[], Engine]):
        """`make` makes the engine, in its thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._engine = self._thread.submit(make).result()

    async def exchange(self, submitted: Mapping[int, Request], aborted: Sequence[int]) -> dict[int, Completion]:
        """See `Replica.exchange`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._exchange, submitted, aborted)

    def _exchange(self, submitted: Mapping[int, Request], aborted: Sequence[int]) -> dict[int, Completion]:
        self._engine.submit(submitted)
        self._engine.abort(aborted)
        return self._engine.poll(_SLICE_S)
