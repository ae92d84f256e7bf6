"""The engines of a run, which also answer over HTTP while they serve a rollout."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from nemo_rl_lite.endpoint.anybody import Anybody, Speaker
from nemo_rl_lite.endpoint.server import Endpoint
from nemo_rl_lite.generation.interface import Generation, Requests


@dataclass(frozen=True)
class ServedGeneration:
    """`Generation` that also answers over HTTP. `speaker` answers requests with the token; None: they are refused, and
    only the sessions of episodes get answers."""

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
