"""Wait for concurrent calls of workers, and raise soon after one fails."""

import asyncio
import logging
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from nemo_rl_lite.cluster.heartbeat import hang
from nemo_rl_lite.cluster.limits import PhaseLimits
from nemo_rl_lite.errors import LostTouchError, WorkerError
from nemo_rl_lite.observability.liveness import limited

log = logging.getLogger(__name__)

# Seconds to wait for more failures after the first one, which is often not the cause.
GRACE_S = 2.0
# Seconds to wait after a communication failure, until Ray notices a dead process or node.
DEATH_S = 15.0
_LOST_TOUCH = 2
# Phase of the calls that start workers.
START = "start"
# Errors of a GPU that is broken, or was for a moment. Errors of memory and of kernels' checks are not among them.
_DEVICE = re.compile(
    r"CUDA error: .*(ECC|NVLink|hardware|unspecified launch|illegal memory|unknown error|initialization|unavailable)|"
    r"no CUDA-capable device|GPU is lost",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(r"connection (closed|reset)|gloo|nccl|timed out waiting", re.IGNORECASE)


@dataclass(frozen=True)
class Call:
    """A method call on every worker of a group. Errors name `phase`. `limit_s`: seconds until the call counts as
    hanging (None: never). `limits` counts its duration."""

    workers: tuple[str, ...]
    phase: str
    references: tuple[Any, ...]
    limit_s: float | None = None
    limits: PhaseLimits | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def is_start(self) -> bool:
        """Return whether the call is part of a start, which a restart would repeat."""
        return self.phase == START

    def by_rank(self, ranks: Sequence[int]) -> dict[int, "Call"]:
        """Return the call of each rank. A rank with several processes has several references."""
        size = len(self.references) // len(ranks)
        parts = {rank: slice(place * size, (place + 1) * size) for place, rank in enumerate(ranks)}
        return {
            rank: replace(self, workers=self.workers[part], references=self.references[part])
            for rank, part in parts.items()
        }

    @property
    def slow_at(self) -> float:
        """Return the time of `time.monotonic` from which the call is slow."""
        slow_s = None if self.limits is None else self.limits.slow_s(self.phase)
        return math.inf if slow_s is None else self.began + slow_s


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
            `limit_s` if each call has one. A slow call is first a warning, with its stacks.
    """
    limits = [call.limit_s for call in calls if call.limit_s is not None]
    if timeout_s is None and len(limits) == len(calls):
        # The workers first write their stacks to the logs.
        timeout_s = max(limits) + GRACE_S
    origin = {
        reference: (worker, call)
        for call in calls
        for worker, reference in zip(call.workers, call.references, strict=True)
    }
    results: dict[Any, Any] = {}
    failures: list[_Failure] = []
    pending = list(origin)
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    slow_at = min((call.slow_at for call in calls), default=math.inf)
    while pending:
        until = min(deadline, slow_at)
        left = None if math.isinf(until) else max(until - time.monotonic(), 0)
        with limited("waiting for workers, whose calls have their own limits", None):
            done, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not done and slow_at < deadline:
            slow_at, (_, call) = math.inf, origin[pending[0]]
            slow = hang([origin[one][0] for one in pending], call.phase, "unusually slow")
            log.warning("%s: %s is %s\n%s", call.phase, slow.worker, slow.cause, slow.details)
            continue
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
    late = origin[pending[0]][1] if pending else None
    if failures:
        nearest = min(failures, key=lambda failure: failure.distance)
        nearest.error.others_running = bool(pending)
        if late is not None and nearest.distance == _LOST_TOUCH:
            error = hang(waiting, late.phase, f"it is still running, and {nearest.error}", not late.is_start)
            error.details += f"\n\n{nearest.error.details}"
            raise error from nearest.error
        raise nearest.error
    if late is not None:
        raise hang(waiting, late.phase, f"not done within {timeout_s or max(limits):g} s", not late.is_start)
    ended = time.monotonic()
    for call in calls:
        if call.limits is not None:
            call.limits.note(call.phase, ended - call.began)
    return [results[reference] for reference in origin]


def has_died(call: Call) -> bool:
    """Return whether a worker of a call is known to have died, without waiting."""
    done, _ = ray.wait([*call.references], num_returns=len(call.references), timeout=0)
    outcomes = (_outcome(reference, "", call) for reference in done)
    return any(isinstance(outcome, _Failure) and outcome.error.lost for outcome in outcomes)


@dataclass(frozen=True)
class _Failure:
    """A worker's error, and its distance from the cause: 0 died, 1 failed, 2 lost the connection to another."""

    distance: int
    error: WorkerError


def _outcome(reference: Any, worker: str, call: Call) -> Any:
    phase = call.phase
    try:
        return ray.get(reference)
    except RayTaskError as error:
        # Imported late: the launcher starts Ray before it imports torch.
        from torch.distributed import DistError

        cause = error.cause if isinstance(error.cause, BaseException) else error
        first_line = next((line for line in str(cause).splitlines() if line.strip()), "")
        lost_touch = isinstance(cause, (LostTouchError, DistError)) or bool(_COMMUNICATION.search(str(cause)))
        return _Failure(
            _LOST_TOUCH if lost_touch else 1,
            WorkerError(
                worker,
                phase,
                f"{type(cause).__name__}: {first_line}",
                details=str(error),
                raised=type(cause).__name__,
                is_transient=not call.is_start and (lost_touch or bool(_DEVICE.search(str(cause)))),
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
