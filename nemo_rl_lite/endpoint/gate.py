"""The way from the server's thread to the event loop that has the engines. It is open while they generate."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_lite.endpoint.protocol import Answer, Asked, RefusedError, Respondent

Written = dict[str, Any]
"""The body of a response."""

ASLEEP = (
    "the engines do not generate now, because the policy trains or gets its new weights to them: ask again during the "
    "next rollout"
)


@dataclass(eq=False)
class _Session:
    """Who answers the requests of a key, and those that are under way."""

    respondent: Respondent
    tasks: set[asyncio.Task] = field(default_factory=set)


class Gate:
    """Knows the keys, and gives each request to the respondent of its key."""

    def __init__(self, token: str, write: Callable[[Asked, Answer], Written]):
        """`token` is a key that is known also while the gate is closed. `write` makes a response of an answer."""
        self._token, self._write = token, write
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: dict[str, _Session] = {}

    @property
    def is_open(self) -> bool:
        return self._loop is not None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Within the block requests are answered, in this event loop. Those that are left at its end are cancelled."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            with self._lock:
                self._loop = None
            # What the server's thread has just handed over begins now, and ends at once.
            await asyncio.sleep(0)

    @asynccontextmanager
    async def session(self, respondent: Respondent, key: str | None = None) -> AsyncIterator[str]:
        """Within the block the respondent answers the requests with the key that this yields. What is under way at its
        end is cancelled, and has ended."""
        key, session = key or secrets.token_urlsafe(24), _Session(respondent)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            for task in session.tasks:
                task.cancel()
            await asyncio.gather(*session.tasks, return_exceptions=True)

    def knows(self, key: str) -> bool:
        """Whether a request with this key may be answered, now or later."""
        return key in self._sessions or secrets.compare_digest(key.encode(), self._token.encode())

    def ask(self, key: str, asked: Asked) -> Future[Written]:
        """Hand over a request; called by the server's thread. Cancelling the future aborts the request.

        Raises:
            RefusedError: the gate is closed.
        """
        with self._lock:
            if self._loop is None:
                raise RefusedError(503, ASLEEP)
            return asyncio.run_coroutine_threadsafe(self._answer(key, asked), self._loop)

    async def _answer(self, key: str, asked: Asked) -> Written:
        session = self._sessions.get(key)
        if session is None or not self.is_open:
            raise RefusedError(503, ASLEEP)
        task = asyncio.current_task()
        if task is not None:
            session.tasks.add(task)
            task.add_done_callback(session.tasks.discard)
        return self._write(asked, await session.respondent.respond(asked))
