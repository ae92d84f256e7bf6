"""The environments of the episodes that are under way, in this process or in others."""

import asyncio
import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from nemo_rl_lite.config.sections.data import EnvironmentConfig
from nemo_rl_lite.data.problems import Message, Problem
from nemo_rl_lite.environments.interface import Environment, Observation
from nemo_rl_lite.environments.registry import INSTANT, find_environment
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.host.pool import CallPool, StartError, Target, as_call_error


class Environments(Protocol):
    """Environments of many episodes, each known by a number, its session."""

    async def step(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """Let the session's environment answer; the first call makes it. Raises CallError: there is no answer."""
        ...

    async def cut_short(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        """Return the environment's reward for an episode that it is not done with, None where it gives none. Raises
        CallError: there is no answer."""
        ...

    async def close(self, session: int) -> None:
        """The episode is over."""
        ...


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
        self.step = self._step_async if is_async else self._step
        self.cut_short = self._cut_short_async if is_async else self._cut_short
        self.close = self._close_async if is_async else self._close

    def _step(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        return self._environment(session).step(problem, conversation)

    async def _step_async(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        return await _awaited(self._environment(session).step(problem, conversation))

    def _cut_short(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        method = getattr(self._environment(session), "cut_short", None)
        return None if method is None else method(problem, conversation)

    async def _cut_short_async(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        return await _awaited(self._cut_short(session, problem, conversation))

    def _close(self, session: int) -> Any:
        """Return what `close()` returns, which may be awaitable."""
        closing = getattr(self._environments.pop(session, None), "close", None)
        try:
            return _reported(closing()) if callable(closing) else None
        except (Exception, SystemExit) as error:  # a user's environment may raise anything
            _report(error)

    async def _close_async(self, session: int) -> None:
        await _awaited(self._close(session))

    def _environment(self, session: int) -> Environment:
        if session not in self._environments:
            self._environments[session] = self._kind(**self._kwargs)
        return self._environments[session]


class InThisProcess:
    """For environments that answer at once."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]):
        self._sessions = Sessions(name, kwargs)

    async def step(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """See `Environments.step`. The environment gets copies: what it changes is its own."""
        return await self._asked(self._sessions.step, session, problem, conversation)

    async def cut_short(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        """See `Environments.cut_short`."""
        return await self._asked(self._sessions.cut_short, session, problem, conversation)

    async def _asked(self, method: Callable[..., Any], session: int, *arguments: Any) -> Any:
        try:
            return await _awaited(method(session, *copy.deepcopy(arguments)))
        except (Exception, SystemExit) as error:  # a user's environment may raise anything
            raise as_call_error(error) from error

    async def close(self, session: int) -> None:
        """See `Environments.close`."""
        await _awaited(self._sessions.close(session))


class InProcesses:
    """For all others: `environment.processes` processes, and `environment.concurrency` steps at a time."""

    def __init__(self, config: EnvironmentConfig):
        arguments = {"name": config.name, "kwargs": config.kwargs}
        path = f"{Sessions.__module__}.{Sessions.__qualname__}"
        target = Target(path, arguments, "the environment's process", "environment.timeout_s")
        processes = min(config.processes, config.concurrency)
        self._name = config.name
        self._pool = CallPool(target, processes, -(-config.concurrency // processes), config.timeout_s)

    async def step(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """See `Environments.step`. Raises DataError: the processes do not start."""
        return await self._asked("step", session, problem, list(conversation))

    async def cut_short(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        """See `Environments.cut_short`. Raises DataError: the processes do not start."""
        return await self._asked("cut_short", session, problem, list(conversation))

    async def _asked(self, method: str, session: int, *arguments: Any) -> Any:
        future = self._pool.submit(method, session, *arguments, session=session)
        try:
            return await asyncio.wrap_future(future)
        except StartError as error:
            raise DataError(f"environment.name = {self._name}: {error}") from error

    async def close(self, session: int) -> None:
        """See `Environments.close`."""
        self._pool.close(session)


def _reported(closed: Any) -> Any:
    async def wait() -> None:
        try:
            await closed
        except (Exception, SystemExit) as error:  # a user's environment may raise anything
            _report(error)

    return wait() if inspect.isawaitable(closed) else None


@cache
def _report_once(text: str) -> None:
    # An episode does not depend on it, but what an environment holds may be left behind.
    sys.stderr.write(f"close() of the environment failed: {text}\n")


def _report(error: BaseException) -> None:
    _report_once(str(as_call_error(error)))


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer
