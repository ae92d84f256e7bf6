"""Groups of workers in Ray actors: start them, call them together, and fail at once when one fails."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from nemo_rl_lite.cluster.host import Host
from nemo_rl_lite.errors import LauncherError, WorkerError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """A method running on every worker of a group. `phase` says what for; it is in the error when one fails."""

    workers: tuple[str, ...]
    phase: str
    references: tuple[Any, ...]


@dataclass
class WorkerGroup:
    """Workers of one kind, ranks 0, 1, ..., each in a process of its own."""

    name: str
    hosts: list[Any] = field(default_factory=list)

    @classmethod
    def create(cls, name: str, size: int, log_folder: str, environment: dict[str, str]) -> "WorkerGroup":
        """Start `size` empty processes. `environment` is there before the first import."""
        options = {"runtime_env": {"env_vars": environment}}
        actor: Any = Host
        hosts = [actor.options(**options).remote(f"{log_folder}/{name}-{rank}.log") for rank in range(size)]
        return cls(name, hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def start(
        self, class_path: str, arguments: Sequence[dict[str, Any]], environments: Sequence[dict[str, str]]
    ) -> Call:
        """Construct the worker `class_path` in every process, each with its own arguments and environment."""
        references = [
            host.start.remote(class_path, *own) for host, *own in zip(self.hosts, arguments, environments, strict=True)
        ]
        return self._as_call("start", references)

    def call(self, method: str, *arguments: Any, phase: str = "") -> Call:
        """The same call on every worker."""
        return self._as_call(phase or method, [host.call.remote(method, *arguments) for host in self.hosts])

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]], phase: str = "") -> Call:
        """A call on every worker, each with its own arguments."""
        references = [host.call.remote(method, *own) for host, own in zip(self.hosts, arguments, strict=True)]
        return self._as_call(phase or method, references)

    def address(self) -> tuple[str, int]:
        """Rank 0's address and a free port there."""
        return wait(Call((f"{self.name} rank 0",), "start", (self.hosts[0].free_port.remote(),)))[0]

    def peak_memory(self) -> list[int]:
        """Highest resident memory of each worker's process so far, in bytes."""
        return wait(self._as_call("memory", [host.peak_memory.remote() for host in self.hosts]))

    def _as_call(self, phase: str, references: list[Any]) -> Call:
        return Call(tuple(f"{self.name} rank {rank}" for rank in range(len(self))), phase, tuple(references))


def wait(*calls: Call, timeout_s: float | None = None) -> list[Any]:
    """The results of all workers of all calls, in order; ends with the first failure, whichever worker it is on.

    Raises:
        WorkerError: naming the worker, the phase and the cause.
        LauncherError: the worker's own, where it raised one.
    """
    origin = {
        reference: (worker, call.phase)
        for call in calls
        for worker, reference in zip(call.workers, call.references, strict=True)
    }
    pending = list(origin)
    results: dict[Any, Any] = {}
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while pending:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        done, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not done:
            waiting = ", ".join(sorted(origin[reference][0] for reference in pending))
            raise WorkerError(waiting, origin[pending[0]][1], f"not done within {timeout_s:g} s")
        for reference in done:
            results[reference] = _result(reference, *origin[reference])
    return [results[reference] for reference in origin]


def _result(reference: Any, worker: str, phase: str) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, LauncherError):
            raise cause from None
        first_line = next(iter(str(cause).splitlines()), "")
        raise WorkerError(worker, phase, f"{type(cause).__name__}: {first_line}", details=str(error)) from None
    except (ActorDiedError, RayActorError) as error:
        raise WorkerError(worker, phase, "the process died (killed, or out of memory?)", details=str(error)) from None
    except (GetTimeoutError, RayError) as error:
        raise WorkerError(worker, phase, type(error).__name__, details=str(error)) from None
