"""A scripted replica: its engine works while somebody waits for a report, so that tests see each step."""

import asyncio
from collections.abc import Mapping
from typing import Any

from nemo_rl_lite.generation.interface import EngineLoad


class Stepped:
    """Calls `work(submitted, aborted)` in each report. A pause waits for the report in flight."""

    load: Any = EngineLoad()
    seconds = 0.0005

    def __init__(self) -> None:
        self.steps, self.under_way, self.pending = 0, 0, ({}, [])
        self.unreported: dict = {}
        self.may_work, self.is_quiet = asyncio.Event(), asyncio.Event()
        self.may_work.set(), self.is_quiet.set()

    def work(self, submitted: Mapping, aborted: list) -> dict:
        """Return what is finished."""
        raise NotImplementedError

    async def send(self, requests, aborted):
        self.pending = self.pending[0] | dict(requests), [*self.pending[1], *aborted]
        if not requests:
            # Nobody may ask for a report, which would hand over the numbers.
            self.unreported |= self.exchange()

    async def report(self):
        await asyncio.sleep(self.seconds)
        await self.may_work.wait()
        self.under_way += 1
        self.is_quiet.clear()
        try:
            await asyncio.sleep(0)
            finished, self.unreported = self.unreported | self.exchange(), {}
            return finished
        finally:
            self.under_way -= 1
            self.is_quiet.set()

    def exchange(self) -> dict:
        given, self.pending = self.pending, ({}, [])
        self.steps += 1
        return self.work(*given)

    async def pause(self):
        self.may_work.clear()
        await self.is_quiet.wait()

    async def resume(self):
        self.may_work.set()
