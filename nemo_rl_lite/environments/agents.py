"""Find an agent by its dotted path or file, and let it play episodes in processes of its own.

An agent plays an episode by itself: it asks an OpenAI-compatible endpoint for the policy's responses.
"""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_rl_lite.config.schema import AgentConfig
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import ConfigError, DataError, Violation
from nemo_rl_lite.system.pool import CallPool, StartError, Target


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


def check_agent(config: AgentConfig) -> None:
    """Import the configured agent, and see whether it can be called as episodes will call it.

    Raises:
        ConfigError: there is no such function, or it does not take `agent.kwargs`.
    """
    if config.name is None:
        return
    try:
        agent: Agent = imported(config.name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        fix = "give package.module.function or path/to/file.py:function of a function that can be imported"
        raise ConfigError([Violation("agent.name", config.name, rule, fix)]) from error
    if not callable(agent):
        raise ConfigError([Violation("agent.name", config.name, "is not a function", "name a function")])
    try:
        inspect.signature(agent).bind("problem", "endpoint", **config.kwargs)
    except TypeError as error:
        rule, fix = (
            f"do not fit {config.name}: {error}",
            "an agent is called as agent(problem, endpoint, **agent.kwargs)",
        )
        raise ConfigError([Violation("agent.kwargs", dict(config.kwargs), rule, fix)]) from None


class Agents:
    """Plays episodes in `agent.processes` processes, `agent.concurrency` at a time."""

    def __init__(self, config: AgentConfig, host: str):
        """`host`: where the endpoint listens."""
        arguments = {"name": config.name, "kwargs": config.kwargs, "host": host}
        path = f"{_Calls.__module__}.{_Calls.__qualname__}"
        target = Target(path, arguments, "the agent's process", "agent.timeout_s")
        processes = min(config.processes, config.concurrency)
        self._name = config.name
        self._pool = CallPool(target, processes, -(-config.concurrency // processes), config.timeout_s)

    async def play(self, problem: Problem, endpoint: Endpoint) -> Any:
        """Let the agent play one episode; return what it returns.

        Raises:
            CallError: the agent raises or is late, or its process ends.
            DataError: the processes do not start.
        """
        try:
            return await asyncio.wrap_future(self._pool.submit("play", problem, endpoint))
        except StartError as error:
            raise DataError(f"agent.name = {self._name}: {error}") from error


class _Calls:
    """The agent in one of these processes."""

    def __init__(self, name: str, kwargs: Mapping[str, Any], host: str):
        _reach_directly(host)
        self._agent: Any = imported(name)
        self._kwargs = kwargs
        # A pool runs coroutine functions in its event loop, and everything else in threads.
        self.play = self._play_async if inspect.iscoroutinefunction(self._agent) else self._play

    def _play(self, problem: Problem, endpoint: Endpoint) -> Any:
        return self._agent(problem, endpoint, **self._kwargs)

    async def _play_async(self, problem: Problem, endpoint: Endpoint) -> Any:
        return await self._agent(problem, endpoint, **self._kwargs)


def _reach_directly(host: str) -> None:
    """Let clients of this process reach the launcher without the proxy that HTTP_PROXY may name."""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join([*filter(None, [os.environ.get(name)]), "127.0.0.1", host])
