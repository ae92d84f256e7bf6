"""Run a user's agent, which controls an episode and asks an endpoint with OpenAI's and Anthropic's APIs."""

import functools
import inspect
import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl_lite.config.user_code import imported, imported_for
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.environments.registry import user_pool
from nemo_rl_lite.errors import ConfigError, Violation

if TYPE_CHECKING:
    # Takes most of the start of a process of user code.
    from nemo_rl_lite.config.schema import AgentConfig


@dataclass(frozen=True)
class Endpoint:
    """Endpoint of one episode: a URL that ends in `/v1`, as OpenAI's clients take it, the episode's key, and the name
    of the model."""

    base_url: str
    api_key: str
    model: str

    @property
    def anthropic_base_url(self) -> str:
        """The URL for Anthropic's clients, without `/v1`."""
        return self.base_url.removesuffix("/v1")


AgentReward = float | Sequence[float] | None


@dataclass(frozen=True)
class Outcome:
    """Reward of an episode, as an agent returns it, with metrics: numbers of the episode by name."""

    reward: AgentReward = None
    metrics: Mapping[str, float] = field(default_factory=dict)


AgentAnswer = AgentReward | Outcome


class Agent(Protocol):
    """A function that plays one episode. Episodes of an `async def` function share a thread; otherwise each has its own
    thread."""

    def __call__(self, problem: Problem, endpoint: Endpoint, **kwargs: Any) -> AgentAnswer | Awaitable[AgentAnswer]:
        """Play one episode and return its reward, or None for the configured reward. A list has the reward of each
        response, in the order in which the endpoint answered. An `Outcome` has metrics too. `kwargs` are
        `agent.kwargs`."""
        ...


def check_agent(config: "AgentConfig") -> None:
    """Import the configured agent, and check its signature. Raises ConfigError: there is no such function, or it does
    not take `agent.kwargs`."""
    if config.name is None:
        return
    fix = "give package.module.function or path/to/file.py:function of a function that can be imported"
    agent: Agent = imported_for("agent.name", config.name, fix)
    try:
        inspect.signature(agent).bind("problem", "endpoint", **config.kwargs)
    except TypeError as error:
        rule, fix = f"do not fit {config.name}: {error}", "it is called as agent(problem, endpoint, **agent.kwargs)"
        raise ConfigError([Violation("agent.kwargs", dict(config.kwargs), rule, fix)]) from None


class Agents:
    """Plays episodes in the agent's processes."""

    def __init__(self, config: "AgentConfig", host: str):
        """`host`: host of the endpoint."""
        self._pool = user_pool("agent", config, _Calls, host=host)

    async def play(self, problem: Problem, endpoint: Endpoint) -> Any:
        """Call the agent for one episode. Raises what `CallPool.call` raises."""
        return await self._pool.call("play", problem, endpoint)


class _Calls:
    """The agent in one of its processes."""

    def __init__(self, name: str, kwargs: Mapping[str, Any], host: str):
        # Reach the launcher without a proxy.
        for variable in ("NO_PROXY", "no_proxy"):
            os.environ[variable] = ",".join([*filter(None, [os.environ.get(variable)]), "127.0.0.1", host])
        # The pool runs coroutine functions, also partial ones, in its event loop, and others in threads.
        self.play = functools.partial(imported(name), **kwargs)
