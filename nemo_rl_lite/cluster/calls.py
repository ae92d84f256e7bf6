"""Wait for concurrent calls of workers, and raise soon after one fails."""

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from nemo_rl_lite.cluster.heartbeat import hang
from nemo_rl_lite.errors import LostTouchError, WorkerError
from nemo_rl_lite.observability.liveness import limited

# Seconds to wait for more failures after the first one, which is often not the cause.
GRACE_S = 2.0
# Seconds to wait after a communication failure, until Ray notices a dead process or node.
DEATH_S = 15.0
_LOST_TOUCH = 2
_COMMUNICATION = re.compile(r"connection (closed|reset)|gloo|nccl|timed out waiting", re.IGNORECASE)


@dataclass(frozen=True)
class Call:
    """A method call on every worker of a group. Errors name `phase`. `limit_s`: seconds until the call counts as
    hanging (None: never)."""

    workers: tuple[str, ...]
    phase: str
    references: tuple[Any, ...]
    limit_s: float | None = None


async def result(call: Call) -> list[Any]:
    """Await one call, with the results and errors of `wait`."""
    futures = [asyncio.wrap_future(reference.future()) for reference in call.references]
    for future in futures:
        # `wait` raises the error; asyncio would also report it after a cancellation.
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        # The worker first writes its stack to the log.
        _, late = await asyncio.wait(futures, timeout=None if call.limit_s is None else call.limit_s + GRACE_S)
    finally:
        # Otherwise asyncio reports a failure while the loop ends.
        for future in futures:
            future.cancel()
    return wait(call, timeout_s=0 if late else None)


def wait(*calls: Call, timeout_s: float | None = None) -> list[Any]:
    """Return the results of all workers of all calls, in order, or raise soon after the first failure.

    One worker's failure makes others fail in collectives, so the probable cause is raised. That is a worker that died,
    otherwise one that failed outside communication, otherwise one that is still running.

    Raises:
        WorkerError: names worker, phase and cause. Also raised after `timeout_s` seconds, or after the longest
            `limit_s` if each call has one.
    """
    limits = [call.limit_s for call in calls if call.limit_s is not None]
    if timeout_s is None and len(limits) == len(calls):
        # The workers first write their stacks to the logs.
        timeout_s = max(limits) + GRACE_S
    origin = {
        reference: (worker, call.phase)
        for call in calls
        for worker, reference in zip(call.workers, call.references, strict=True)
    }
    results: dict[Any, Any] = {}
    failures: list[_Failure] = []
    pending = list(origin)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while pending:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        with limited("waiting for workers, whose calls have their own limits", None):
            done, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not done:
            break
        for reference in done:
            outcome = _outcome(reference, *origin[reference])
            if not isinstance(outcome, _Failure):
                results[reference] = outcome
                continue
            failures.append(outcome)
            only_lost_touch = all(failure.distance == _LOST_TOUCH for failure in failures)
            if len(failures) == 1 or not only_lost_touch:
                deadline = time.monotonic() + (DEATH_S if only_lost_touch else GRACE_S)
    waiting = [origin[reference][0] for reference in pending]
    if failures:
        nearest = min(failures, key=lambda failure: failure.distance)
        nearest.error.others_running = bool(pending)
        if pending and nearest.distance == _LOST_TOUCH:
            late = hang(waiting, origin[pending[0]][1], f"it is still running, and {nearest.error}")
            late.details += f"\n\n{nearest.error.details}"
            raise late from nearest.error
        raise nearest.error
    if pending:
        raise hang(waiting, origin[pending[0]][1], f"not done within {timeout_s or max(limits):g} s")
    return [results[reference] for reference in origin]


@dataclass(frozen=True)
class _Failure:
    """A worker's error, and its distance from the cause: 0 died, 1 failed, 2 lost the connection to another."""

    distance: int
    error: WorkerError


def _outcome(reference: Any, worker: str, phase: str) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        # Imported late: the launcher starts Ray before it imports torch.
        from torch.distributed import DistError

        cause = error.cause if isinstance(error.cause, BaseException) else error
        first_line = next((line for line in str(cause).splitlines() if line.strip()), "")
        lost_touch = isinstance(cause, (LostTouchError, DistError)) or _COMMUNICATION.search(str(cause))
        return _Failure(
            _LOST_TOUCH if lost_touch else 1,
            WorkerError(
                worker,
                phase,
                f"{type(cause).__name__}: {first_line}",
                details=str(error),
                raised=type(cause).__name__,
            ),
        )
    except RayActorError as error:
        return _Failure(
            0, WorkerError(worker, phase, "the process died (killed, or out of memory?)", details=str(error), lost=True)
        )
    except RayError as error:
        # For example, Ray killed a process because the machine ran out of memory.
        said = " ".join(str(error).split())[:400]
        return _Failure(1, WorkerError(worker, phase, f"{type(error).__name__}: {said}", details=str(error)))
