"""Find an environment by a name from here, a dotted path or a file, and run those of the episodes under way."""

import asyncio
import copy
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from nemo_rl_lite.config.schema import EnvironmentConfig
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tools import Tool, callable_tools
from nemo_rl_lite.environments.interface import Environment, Observation
from nemo_rl_lite.errors import ConfigError, DataError, Violation
from nemo_rl_lite.system.pool import CallPool, StartError, Target, as_call_error

ENVIRONMENTS = {
    "calculator": "nemo_rl_lite.environments.tools.Calculator",
    "tools": "nemo_rl_lite.environments.tools.Functions",
    "python": "nemo_rl_lite.environments.tools.Python",
    "nemo_gym": "nemo_rl_lite.environments.nemo_gym.NeMoGym",
    "verifiers": "nemo_rl_lite.environments.verifiers.Verifiers",
}


# These answer at once, and need no process of their own.
INSTANT = frozenset({"calculator"})


def find_environment(name: str) -> Callable[..., Environment]:
    """Return the class of an environment: one of `ENVIRONMENTS`, or a user's (see `imported`). Raises what its import
    raises."""
    return imported(ENVIRONMENTS.get(name, name))


def check_environment(config: EnvironmentConfig) -> tuple[Tool, ...]:
    """Make an environment of the configured class, as each episode will, let it check what it needs, and return the
    tools that it offers.

    Raises:
        ConfigError: there is no such class, or it cannot be made with `environment.kwargs`, or its tools are no tools.
    """
    if config.name is None:
        return ()
    try:
        kind = find_environment(config.name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        own = "package.module.Class or path/to/file.py:Class that can be imported"
        fix = f"choose one of {', '.join(ENVIRONMENTS)}, or give {own}"
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError([Violation("environment.name", config.name, rule, fix)]) from error
    try:
        environment = kind(**config.kwargs)
        getattr(environment, "check", lambda: None)()
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        key, value = ("kwargs", dict(config.kwargs)) if config.kwargs else ("name", config.name)
        rule = f"{config.name} cannot be made with environment.kwargs: {type(error).__name__}: {error}"
        fix = "give the arguments that it needs, environment.kwargs.NAME=VALUE, or correct the class"
        raise ConfigError([Violation(f"environment.{key}", value, rule, fix)]) from error
    try:
        tools = callable_tools(getattr(environment, "tools", ()), "its attribute `tools`")
    except (Exception, SystemExit) as error:  # it may be a user's property
        fix = "correct them: docs/extending.md#a-tool has an example"
        rule = f"offers no usable tools: {error}"
        raise ConfigError([Violation("environment.name", config.name, rule, fix)]) from error
    if not callable(getattr(environment, "step", None)):
        rule, fix = "has no method step(problem, conversation)", "see nemo_rl_lite/environments/interface.py"
        raise ConfigError([Violation("environment.name", config.name, rule, fix)])
    return tools


class Environments(ABC):
    """Environments of many episodes, each known by a number, its session."""

    async def step(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """Let the session's environment answer; the first call makes it.

        Raises:
            CallError: there is no answer.
            DataError: the processes do not start.
        """
        return await self._ask("step", session, problem, list(conversation))

    async def cut_short(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        """Return the environment's reward for an episode that it is not done with, None where it gives none. Raises
        what `step` raises."""
        return await self._ask("cut_short", session, problem, list(conversation))

    @abstractmethod
    async def close(self, session: int) -> None:
        """The episode is over."""

    @abstractmethod
    async def _ask(self, method: str, session: int, *arguments: Any) -> Any: ...


def make_environments(config: EnvironmentConfig) -> Environments | None:
    """Return the run's environments; None where episodes have one turn."""
    if config.name is None:
        return None
    return InThisProcess(config.name, config.kwargs) if config.name in INSTANT else InProcesses(config)


class Sessions:
    """Makes an environment for each session, calls it, and forgets it; lives where the environments do."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]):
        self._kind, self._kwargs = find_environment(name), kwargs
        self._environments: dict[int, Environment] = {}
        is_async = inspect.iscoroutinefunction(getattr(self._kind, "step", None))
        # A pool runs coroutine functions in its event loop, and everything else in threads.
        wrap: Callable[..., Callable[..., Any]] = _as_coroutine if is_async else lambda method: method
        self.step, self.cut_short, self.close = wrap(self._step), wrap(self._cut_short), wrap(self._close)

    def _step(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        return self._environment(session).step(problem, conversation)

    def _cut_short(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        method = getattr(self._environment(session), "cut_short", None)
        return None if method is None else method(problem, conversation)

    def _close(self, session: int) -> Any:
        """Return what `close()` returns, which may be awaitable."""
        closing = getattr(self._environments.pop(session, None), "close", None)
        try:
            return _reported(closing()) if callable(closing) else None
        except (Exception, SystemExit) as error:  # a user's environment may raise anything
            _report_once(str(as_call_error(error)))

    def _environment(self, session: int) -> Environment:
        if session not in self._environments:
            self._environments[session] = self._kind(**self._kwargs)
        return self._environments[session]


class InThisProcess(Environments):
    """For environments that answer at once. They get copies: what they change is their own."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]):
        self._sessions = Sessions(name, kwargs)

    async def _ask(self, method: str, session: int, *arguments: Any) -> Any:
        try:
            return await _awaited(getattr(self._sessions, method)(session, *copy.deepcopy(arguments)))
        except (Exception, SystemExit) as error:  # a user's environment may raise anything
            raise as_call_error(error) from error

    async def close(self, session: int) -> None:
        await _awaited(self._sessions.close(session))


class InProcesses(Environments):
    """For all others: `environment.processes` processes, and `environment.concurrency` steps at a time."""

    def __init__(self, config: EnvironmentConfig):
        arguments = {"name": config.name, "kwargs": config.kwargs}
        path = f"{Sessions.__module__}.{Sessions.__qualname__}"
        target = Target(path, arguments, "the environment's process", "environment.timeout_s")
        processes = min(config.processes, config.concurrency)
        self._name = config.name
        self._pool = CallPool(target, processes, -(-config.concurrency // processes), config.timeout_s)

    async def _ask(self, method: str, session: int, *arguments: Any) -> Any:
        try:
            return await asyncio.wrap_future(self._pool.submit(method, session, *arguments, session=session))
        except StartError as error:
            raise DataError(f"environment.name = {self._name}: {error}") from error

    async def close(self, session: int) -> None:
        self._pool.close(session)


def _as_coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*arguments: Any) -> Any:
        return await _awaited(function(*arguments))

    return call


def _reported(closed: Any) -> Any:
    async def wait() -> None:
        try:
            await closed
        except (Exception, SystemExit) as error:  # a user's environment may raise anything
            _report_once(str(as_call_error(error)))

    return wait() if inspect.isawaitable(closed) else None


@cache
def _report_once(text: str) -> None:
    # An episode does not depend on it, but what an environment holds may be left behind.
    sys.stderr.write(f"close() of the environment failed: {text}\n")


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer
