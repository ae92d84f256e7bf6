"""An agent plays an episode by itself: it asks an OpenAI-compatible endpoint for the policy's responses."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_rl_lite.data.problems import Problem


@dataclass(frozen=True)
class Endpoint:
    """Where one episode's responses come from. What any client of OpenAI's API needs: the address, which ends in `/v1`,
    a key of this episode alone, by which its requests are known, and the name of the model."""

    base_url: str
    api_key: str
    model: str


class Agent(Protocol):
    """A function, `async def` or plain, that plays one episode. With `async def`, many episodes share a thread;
    otherwise each has its own."""

    def __call__(self, problem: Problem, endpoint: Endpoint, **kwargs: Any) -> float | Awaitable[float | None] | None:
        """Play one episode and return its reward, or None where the configured reward shall judge its last response.
        `kwargs` are `agent.kwargs`."""
        ...
