"""The engines of a run, which also answer over HTTP while they serve a rollout."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from nemo_rl_lite.endpoint.anybody import Anybody, Speaker
from nemo_rl_lite.endpoint.server import Endpoint
from nemo_rl_lite.generation.interface import Generation, Requests


@dataclass(frozen=True)
class ServedGeneration:
    """`Generation` with an endpoint beside it. `speaker` answers those who have the token; None: nobody does, and the
    endpoint is for the sessions of episodes alone."""

    generation: Generation
    endpoint: Endpoint
    speaker: Speaker | None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Requests]:
        """See `Generation.serving`."""
        async with self.generation.serving() as requests:
            anybody = None if self.speaker is None else Anybody(self.speaker, requests)
            async with self.endpoint.answering(anybody):
                yield requests

    def finish_generation(self) -> dict[str, float]:
        """See `Generation.finish_generation`."""
        return self.generation.finish_generation()
