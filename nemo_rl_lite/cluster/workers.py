"""Groups of workers in Ray actors: starts them, calls them together, and fails soon after one fails."""

import asyncio
import copy
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from nemo_rl_lite.cluster.actor import WorkerActor
from nemo_rl_lite.cluster.heartbeat import hang
from nemo_rl_lite.cluster.placement import Slot
from nemo_rl_lite.errors import LostTouchError, WorkerError
from nemo_rl_lite.observability.limits import limited
from nemo_rl_lite.observability.profiling import Tool

# Seconds to wait for other failures after the first, which is often not the cause.
GRACE_S = 2.0
# Seconds to wait after a failed communication, until Ray notices that a process or a node has died.
DEATH_S = 15.0
_LOST_TOUCH = 2
_COMMUNICATION = re.compile(r"connection (closed|reset)|gloo|nccl|timed out waiting", re.IGNORECASE)


@dataclass(frozen=True)
class Call:
    """A method that runs on every worker of a group. An error names `phase`. `limit_s`: seconds after which the call
    counts as hanging (None: never)."""

    workers: tuple[str, ...]
    phase: str
    references: tuple[Any, ...]
    limit_s: float | None = None


class WorkerGroup:
    """Workers of one kind, ranks 0, 1, ..., each in its own process."""

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        log_folder: str,
        environment: dict[str, str],
        slots_each: int = 1,
        limit_s: float | None = None,
    ):
        """Start an empty process in every slot, with `environment`.

        A worker may need several GPUs (`slots_each`): the process in its first slot is the worker, the processes in its
        other slots reserve GPUs for it. `limit_s`: seconds that a call of a worker's method may take.
        """
        self.name, self._log_folder, self._environment = name, log_folder, environment
        self._limit_s = limit_s
        self._slots = [list(slots[start : start + slots_each]) for start in range(0, len(slots), slots_each)]
        self._ranks = list(range(len(self._slots)))
        self.places = [self._new_place(place) for place in range(len(self._slots))]

    @property
    def hosts(self) -> list[Any]:
        """The worker of each place: the process in its first slot."""
        return [place[0] for place in self.places]

    @property
    def processes(self) -> list[str]:
        """The names of all processes in their heartbeats."""
        return [
            _name(self.name, rank, index)
            for rank, place in zip(self._ranks, self.places, strict=True)
            for index in range(len(place))
        ]

    def __len__(self) -> int:
        return len(self.places)

    def lost(self) -> list[int]:
        """Find the ranks whose processes have died. Wait for the others' current calls, at most as long as a call may
        take."""
        asked = {process.is_there.remote(): rank for rank, place in enumerate(self.places) for process in place}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=self._limit_s)
        return sorted({asked[answer] for answer in answered if not _was_there(answer)})

    def replace(self, ranks: Sequence[int]) -> "WorkerGroup":
        """Start new, empty processes for these ranks in the same slots; return a group of these ranks alone."""
        for rank in ranks:
            for process in self.places[rank]:
                ray.kill(process)
            self.places[rank] = self._new_place(rank)
        part = copy.copy(self)
        part._ranks = list(ranks)
        part.places = [self.places[rank] for rank in ranks]
        return part

    def _new_place(self, rank: int) -> list[Any]:
        actor: Any = WorkerActor
        processes = []
        for index, slot in enumerate(self._slots[rank]):
            worker = _name(self.name, rank, index)
            log_file = f"{self._log_folder}/{self.name}-{rank}{f'-slot-{index}' if index else ''}.log"
            processes.append(actor.options(**slot).remote(worker, log_file, self._environment))
        return processes

    def load(self, class_path: str, environments: Sequence[dict[str, str]]) -> Call:
        """Import the worker `class_path` in every process, each with its own environment."""
        return self._as_call(
            "start", [h.load.remote(class_path, own) for h, own in zip(self.hosts, environments, strict=True)]
        )

    def start(self, arguments: Sequence[dict[str, Any]]) -> Call:
        """Construct the loaded worker in every process, each with its own arguments; returns `WorkerActor.start`'s
        seconds."""
        return self._as_call("start", [h.start.remote(own) for h, own in zip(self.hosts, arguments, strict=True)])

    def gpus(self, timeout_s: float) -> list[list[str]]:
        """Each worker's GPUs, including those reserved for it, in the form of CUDA_VISIBLE_DEVICES."""
        processes = [(index, process) for index, place in enumerate(self.places) for process in place]
        names = tuple(f"{self.name} rank {self._ranks[index]}" for index, _ in processes)
        asked = Call(names, "start", tuple(process.gpus.remote() for _, process in processes))
        gpus: list[list[str]] = [[] for _ in self.places]
        for (index, _), own in zip(processes, wait(asked, timeout_s=timeout_s), strict=True):
            gpus[index] += own
        return gpus

    def put(self, value: Any) -> Any:
        """Store an argument that several workers share, once; each gets the value where it is passed the reference."""
        return ray.put(value)

    def call(self, method: str, *arguments: Any, phase: str = "") -> Call:
        """Call a method of every worker with the same arguments."""
        return self.call_each(method, [arguments] * len(self), phase)

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]], phase: str = "") -> Call:
        """Call a method of every worker, each with its own arguments."""
        phase, limit_s = phase or method, self._limit_s
        pairs = zip(self.hosts, arguments, strict=True)
        references = [host.call.remote(method, phase, limit_s, *own) for host, own in pairs]
        return self._as_call(phase, references, limit_s)

    def call_one(self, place: int, methods: Sequence[tuple[str, tuple[Any, ...]]], phase: str) -> Call:
        """Call methods of one worker, one after the other, each with its arguments."""
        worker, host, limit_s = f"{self.name} rank {self._ranks[place]}", self.hosts[place], self._limit_s
        references = [host.call.remote(method, phase, limit_s, *own) for method, own in methods]
        return Call((worker,) * len(references), phase, tuple(references), limit_s)

    def addresses(self, timeout_s: float) -> list[tuple[str, int]]:
        """Each worker's address and a free port there."""
        return wait(self._as_call("start", [host.free_port.remote() for host in self.hosts]), timeout_s=timeout_s)

    def peak_memory(self) -> list[int]:
        """Highest resident memory of each worker's process so far, in bytes."""
        return wait(self._as_call("memory", [host.peak_memory.remote() for host in self.hosts]))

    def begin_profile(self, tool: Tool) -> Call:
        """Start a trace in every worker's process."""
        return self._as_call("profile", [host.begin_profile.remote(tool) for host in self.hosts], self._limit_s)

    def end_profile(self, folder: Path, suffix: str) -> Call:
        """Write the traces to `<folder>/<name>-<rank><suffix>`."""
        files = [str(folder / f"{self.name}-{rank}{suffix}") for rank in self._ranks]
        ended = [host.end_profile.remote(file) for host, file in zip(self.hosts, files, strict=True)]
        return self._as_call("profile", ended, self._limit_s)

    def _as_call(self, phase: str, references: list[Any], limit_s: float | None = None) -> Call:
        return Call(tuple(f"{self.name} rank {rank}" for rank in self._ranks), phase, tuple(references), limit_s)


def _name(group: str, rank: int, slot: int) -> str:
    return f"{group} rank {rank}" + (f" slot {slot}" if slot else "")


def _was_there(answer: Any) -> bool:
    try:
        return ray.get(answer)
    except RayActorError:
        return False


async def result(call: Call) -> list[Any]:
    """Return what `wait` returns for one call, and raise what it raises, while other coroutines run."""
    futures = [asyncio.wrap_future(reference.future()) for reference in call.references]
    for future in futures:
        # `wait` raises the error, unless this is cancelled; asyncio would report it as one that nobody has seen.
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    # At its limit the worker writes its stack to the log first.
    _, late = await asyncio.wait(futures, timeout=None if call.limit_s is None else call.limit_s + GRACE_S)
    for future in late:
        future.cancel()
    return wait(call, timeout_s=0 if late else None)


def wait(*calls: Call, timeout_s: float | None = None) -> list[Any]:
    """Return the results of all workers of all calls, in order, or raise soon after the first failure.

    Where one worker's failure makes others fail (a collective whose peer has died), raise the error of the worker that
    died, or else of one that failed outside communication, or else of one that is still running while the others gave
    up waiting for it.

    Raises:
        WorkerError: names the worker, the phase and the cause; also raised after `timeout_s` seconds, or after the
            longest `limit_s` of the calls where each has one.
    """
    limits = [call.limit_s for call in calls if call.limit_s is not None]
    if timeout_s is None and len(limits) == len(calls):
        # At their limits the workers write their stacks to the logs first.
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
        with limited("waiting for workers, which have limits of their own", None):
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
    """A worker's error, and its distance from the cause: 0 died, 1 failed, 2 lost connection to another."""

    distance: int
    error: WorkerError


def _outcome(reference: Any, worker: str, phase: str) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        # The launcher starts Ray before it imports torch.
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
        # Such as a process that Ray ended because the machine's memory ran out: the message has the figures.
        said = " ".join(str(error).split())[:400]
        return _Failure(1, WorkerError(worker, phase, f"{type(error).__name__}: {said}", details=str(error)))
