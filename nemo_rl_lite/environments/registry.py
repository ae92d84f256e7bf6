"""Find an environment by a built-in name, a dotted path or a file, and run one per episode."""

import asyncio
import copy
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from nemo_rl_lite.config.user_code import imported, imported_for
from nemo_rl_lite.data.messages import Message
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.tools import Tool, callable_tools
from nemo_rl_lite.environments.interface import Environment, Observation
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.system.pool import CallPool, PoolTarget
from nemo_rl_lite.system.user_errors import CallError, as_call_error, report_once

if TYPE_CHECKING:
    # Takes most of the start of a process of user code.
    from nemo_rl_lite.config.schema import AgentConfig, EnvironmentConfig

ENVIRONMENTS = {
    "calculator": "nemo_rl_lite.environments.tools.Calculator",
    "tools": "nemo_rl_lite.environments.tools.Functions",
    "python": "nemo_rl_lite.environments.tools.Python",
    "nemo_gym": "nemo_rl_lite.environments.nemo_gym.NeMoGym",
}
# Environments fast enough for the launcher's process.
INSTANT = frozenset({"calculator"})
_NOT_CLOSED = "close() of the environment failed"


def find_environment(name: str) -> Callable[..., Environment]:
    """Import the class of an environment: one of `ENVIRONMENTS`, or a user's. Raises what `imported` raises."""
    return imported(ENVIRONMENTS.get(name, name))


def check_environment(config: "EnvironmentConfig") -> tuple[Tool, ...]:
    """Instantiate the configured environment, call its `check`, and return its tools. Raises ConfigError: the class
    cannot be imported or instantiated with `environment.kwargs`, or its tools are invalid."""
    if config.name is None:
        return ()

    def refused(rule: str, fix: str, key: str = "name", value: Any = config.name) -> ConfigError:
        return ConfigError([Violation(f"environment.{key}", value, rule, fix)])

    fix = f"choose one of {', '.join(ENVIRONMENTS)}, or give package.module.Class or path/to/file.py:Class"
    kind = imported_for("environment.name", ENVIRONMENTS.get(config.name, config.name), fix)
    try:
        environment = kind(**config.kwargs)
        getattr(environment, "check", lambda: None)()
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        where = ("kwargs", dict(config.kwargs)) if config.kwargs else ("name", config.name)
        rule = f"{config.name} cannot be instantiated with environment.kwargs: {type(error).__name__}: {error}"
        fix = "give its arguments by environment.kwargs.NAME=VALUE, or correct the class"
        raise refused(rule, fix, *where) from error
    try:
        tools = callable_tools(getattr(environment, "tools", ()), "its attribute `tools`")
    except (Exception, SystemExit) as error:  # it may be a user's property
        fix = "correct them: docs/extending.md#a-tool has an example"
        raise refused(f"offers no usable tools: {error}", fix) from error
    if not callable(getattr(environment, "step", None)):
        raise refused("has no method step(problem, conversation)", "see nemo_rl_lite/environments/interface.py")
    return tools


Resumption = Literal["snapshot", "replay"]
"""Way in which a new environment takes over an episode: by `restore`, or by the same calls of `step`."""


def _resumption(kind: Any) -> Resumption | None:
    """Return how environments of a class take over episodes; None if they cannot."""
    if all(callable(getattr(kind, name, None)) for name in ("state", "restore")):
        return "snapshot"
    return "replay" if getattr(kind, "deterministic", False) is True else None


class Environments(ABC):
    """Environments of many episodes, one per session number."""

    def __init__(self, name: str):
        self.resumption = _resumption(find_environment(name))

    async def step(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Observation:
        """Call the session's environment; the first call creates it. Raises what `CallPool.call` raises."""
        return await self._ask("step", session, problem, list(conversation))

    async def cut_short(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        """Return the reward, or None, of an episode that ends early. Raises what `step` raises."""
        return await self._ask("cut_short", session, problem, list(conversation))

    async def state(self, session: int) -> str | bytes | None:
        """Return the snapshot of the session's environment, as JSON text or bytes; None if it offers none. Raises what
        `step` raises."""
        if self.resumption != "snapshot":
            return None
        state = await self._ask("state", session)
        try:
            return state if isinstance(state, bytes) else json.dumps(state)
        except (TypeError, ValueError) as error:
            rule = f"state() of the environment returned neither JSON nor bytes: {error}"
            raise CallError(rule, is_fault=True) from error

    async def restore(self, session: int, state: str | bytes | None) -> None:
        """Give a snapshot to the session's environment. Raises what `step` raises."""
        await self._ask("restore", session, json.loads(state) if isinstance(state, str) else state)

    @abstractmethod
    async def close(self, session: int) -> None:
        """Close the session's environment."""

    @abstractmethod
    async def _ask(self, method: str, session: int, *arguments: Any) -> Any: ...


def make_environments(config: "EnvironmentConfig") -> Environments | None:
    """Create the run's environments; None without an environment."""
    if config.name is None:
        return None
    return InThisProcess(config.name, config.kwargs) if config.name in INSTANT else InProcesses(config)


def try_environment(environments: Environments, name: str, problem: Problem) -> None:
    """Take one step before a run starts anything, with the problem's own answer as the assistant's turn. Errors that
    may be due to this turn are ignored.

    Raises:
        ConfigError: the environment's code is wrong, whatever the assistant writes.
    """
    conversation = [*problem.messages, {"role": "assistant", "content": problem.answer or ""}]

    async def trial() -> None:
        try:
            await environments.step(-1, problem, conversation)
            if environments.resumption == "snapshot":
                await environments.restore(-2, await environments.state(-1))
        finally:
            for session in (-1, -2):
                await environments.close(session)

    try:
        asyncio.run(trial())
    except CallError as error:
        if error.is_fault:
            fix = "correct the environment's code: this error does not depend on the response"
            raise ConfigError([Violation("environment.name", name, f"{error}{error.place}", fix)]) from error


class Sessions:
    """Creates and calls the environment of each session, in the environments' process."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]):
        self._kind, self._kwargs = find_environment(name), kwargs
        self._environments: dict[int, Environment] = {}
        is_async = inspect.iscoroutinefunction(getattr(self._kind, "step", None))
        # A pool runs coroutine functions in its event loop, and others in threads.
        wrap: Callable[..., Callable[..., Any]] = _as_coroutine if is_async else lambda method: method
        self.step, self.cut_short, self.close = wrap(self._step), wrap(self._cut_short), wrap(self._close)
        self.state, self.restore = wrap(self._state), wrap(self._restore)

    def _step(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        return self._environment(session).step(problem, conversation)

    def _cut_short(self, session: int, problem: Problem, conversation: Sequence[Message]) -> Any:
        method = getattr(self._environment(session), "cut_short", None)
        return None if method is None else method(problem, conversation)

    def _state(self, session: int) -> Any:
        environment: Any = self._environment(session)
        return environment.state()

    def _restore(self, session: int, state: Any) -> Any:
        environment: Any = self._environment(session)
        return environment.restore(state)

    def _close(self, session: int) -> Any:
        closing = getattr(self._environments.pop(session, None), "close", None)
        try:
            closed = closing() if callable(closing) else None
            return _reported(closed) if inspect.isawaitable(closed) else None
        except (Exception, SystemExit) as error:  # a user's environment may raise anything
            report_once(_NOT_CLOSED, error)

    def _environment(self, session: int) -> Environment:
        if session not in self._environments:
            self._environments[session] = self._kind(**self._kwargs)
        return self._environments[session]


class InThisProcess(Environments):
    """Runs fast environments in this process. They get copies of their arguments."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]):
        super().__init__(name)
        self._sessions = Sessions(name, kwargs)

    async def _ask(self, method: str, session: int, *arguments: Any) -> Any:
        try:
            return await _awaited(getattr(self._sessions, method)(session, *copy.deepcopy(arguments)))
        except (Exception, SystemExit) as error:  # a user's environment may raise anything
            raise as_call_error(error) from error

    async def close(self, session: int) -> None:
        await _awaited(self._sessions.close(session))


def user_pool(section: str, config: "EnvironmentConfig | AgentConfig", kind: type, **others: Any) -> CallPool:
    """Start the pool of a section's user code: objects of `kind`, with the configured name, kwargs and `others`."""
    arguments = {"name": config.name, "kwargs": config.kwargs, **others}
    path, key = f"{kind.__module__}.{kind.__qualname__}", f"{section}.name = {config.name}"
    target = PoolTarget(path, arguments, f"the {section}'s process", f"{section}.timeout_s", key)
    processes = min(config.processes, config.concurrency)
    return CallPool(target, processes, -(-config.concurrency // processes), config.timeout_s)


class InProcesses(Environments):
    """Runs environments in separate processes."""

    def __init__(self, config: "EnvironmentConfig"):
        super().__init__(config.name or "")
        self._pool = user_pool("environment", config, Sessions)

    async def _ask(self, method: str, session: int, *arguments: Any) -> Any:
        return await self._pool.call(method, session, *arguments, session=session)

    async def close(self, session: int) -> None:
        self._pool.close(session)


def _as_coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*arguments: Any) -> Any:
        return await _awaited(function(*arguments))

    return call


async def _reported(closing: Awaitable[Any]) -> None:
    try:
        await closing
    except (Exception, SystemExit) as error:  # a user's environment may raise anything
        report_once(_NOT_CLOSED, error)


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer
