"""Groups of workers in Ray actors, and traces of their steps."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from nemo_rl_lite.cluster.actor import ListenedActor, WorkerActor
from nemo_rl_lite.cluster.calls import START, Call, wait
from nemo_rl_lite.cluster.heartbeat import free
from nemo_rl_lite.cluster.limits import PhaseLimits
from nemo_rl_lite.cluster.runtime import Slot
from nemo_rl_lite.config.schema import ProfileConfig
from nemo_rl_lite.observability import profiling


class WorkerGroup:
    """Workers of one kind, ranks 0, 1, ..., each in its own process."""

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        log_folder: str,
        environment: dict[str, str],
        slots_each: int = 1,
        hosts_each: int = 1,
        limit_s: float | None = None,
        is_listened: bool = False,
    ):
        """Start an empty process in every slot, with `environment`.

        A worker of several GPUs has `slots_each` slots, in equal parts on `hosts_each` nodes. The process in the first
        slot is the worker, the first process on each other node is its follower, and the others reserve GPUs.
        `limit_s`: upper time limit of a call. `is_listened`: whether workers take calls of `call_beside`.
        """
        self._actor: Any = ListenedActor if is_listened else WorkerActor
        self.name, self._log_folder, self._environment = name, log_folder, environment
        self.limits, self._slots_per_host = PhaseLimits(limit_s), slots_each // hosts_each
        self._slots = [list(slots[start : start + slots_each]) for start in range(0, len(slots), slots_each)]
        self.ranks = list(range(len(self._slots)))
        self.places = [self._new_place(place) for place in range(len(self._slots))]

    @property
    def hosts(self) -> list[Any]:
        return [place[0] for place in self.places]

    @property
    def processes(self) -> list[str]:
        """Return the names of all processes in heartbeats."""
        return [
            _name(self.name, rank, index)
            for rank, place in zip(self.ranks, self.places, strict=True)
            for index in range(len(place))
        ]

    def __len__(self) -> int:
        return len(self.places)

    def lost(self) -> list[int]:
        """Return the ranks whose processes have died. Waits for the current calls of the others."""
        placed = zip(self.ranks, self.places, strict=True)
        asked = {process.is_there.remote(): rank for rank, place in placed for process in place}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=self.limits.most_s)
        dead = set()
        for answer in answered:
            try:
                ray.get(answer)
            except RayActorError:
                dead.add(asked[answer])
        return sorted(dead)

    def replace(self, ranks: Sequence[int]) -> "WorkerGroup":
        """Start new processes for these ranks in the same slots; return a group of these ranks."""
        # New processes compile again.
        self.limits = PhaseLimits(self.limits.most_s)
        self.end(ranks)
        for rank in ranks:
            self.places[rank] = self._new_place(rank)
        return self.part(ranks)

    def end(self, ranks: Sequence[int]) -> None:
        """Kill the processes of these ranks."""
        for rank in ranks:
            for process in self.places[rank]:
                ray.kill(process)

    def part(self, places: Sequence[int]) -> "WorkerGroup":
        """Return a group of these workers alone, which can be sent to other workers."""
        part = copy.copy(self)
        part.ranks, part.places = [self.ranks[place] for place in places], [self.places[place] for place in places]
        part._actor, part._slots = None, []
        return part

    def _new_place(self, rank: int) -> list[Any]:
        processes = []
        for index, slot in enumerate(self._slots[rank]):
            worker = _name(self.name, rank, index)
            log_file = f"{self._log_folder}/{self.name}-{rank}{f'-slot-{index}' if index else ''}.log"
            processes.append(self._actor.options(**slot).remote(worker, log_file, self._environment))
        return processes

    def load(
        self, class_path: str, environments: Sequence[dict[str, str]], follower_path: str = "", runner_path: str = ""
    ) -> Call:
        """Import the classes of workers and followers, each with its own environment. `runner_path`: see
        `WorkerProcess.load`."""
        return self._start_call(
            [
                process.load.remote(follower_path, own) if slot else process.load.remote(class_path, own, runner_path)
                for (_, slot, process), own in zip(self._started(), environments, strict=True)
            ]
        )

    def start(self, arguments: Sequence[dict[str, Any]]) -> Call:
        """Construct the loaded workers and followers, each with its own arguments; see `WorkerProcess.start`."""
        pairs = zip(self._started(), arguments, strict=True)
        return self._start_call([process.start.remote(own) for (_, _, process), own in pairs])

    def start_reaches(self, part: str) -> Call:
        """Wait until each worker's start has ended this part. Only listened groups can wait."""
        return self._as_call(START, [host.wait_for_part.remote(part) for host in self.hosts])

    def close(self) -> Call:
        """Close the workers after the loss of one, so that their processes can build others. Those that wait for the
        lost one are freed."""
        free([_name(self.name, rank, 0) for rank in self.ranks])
        return self._as_call("close", [host.close.remote() for host in self.hosts])

    def gpus(self, timeout_s: float) -> list[list[str]]:
        """Return the GPUs of each worker and follower, reserved ones included, as in CUDA_VISIBLE_DEVICES."""
        processes = [process for place in self.places for process in place]
        each = len(self.places[0])
        names = tuple(f"{self.name} rank {self.ranks[index // each]}" for index in range(len(processes)))
        asked = Call(names, START, tuple(process.gpus.remote() for process in processes))
        gpus, size = wait(asked, timeout_s=timeout_s), self._slots_per_host
        return [list(chain(*gpus[start : start + size])) for start in range(0, len(gpus), size)]

    def put(self, value: Any) -> Any:
        """Store an argument once for several workers, which receive the value."""
        return ray.put(value)

    def call(self, method: str, *arguments: Any, phase: str = "") -> Call:
        """Call a method of every worker with the same arguments."""
        return self.call_each(method, [arguments] * len(self), phase)

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]], phase: str = "") -> Call:
        """Call a method of every worker, each with its own arguments."""
        phase = phase or method
        limit_s = self.limits.hang_s(phase)
        pairs = zip(self.hosts, arguments, strict=True)
        references = [host.call.remote(method, phase, limit_s, *own) for host, own in pairs]
        return self._as_call(phase, references, limit_s, self.limits)

    def call_one(self, place: int, methods: Sequence[tuple[str, tuple[Any, ...]]], phase: str) -> Call:
        """Call methods of one worker sequentially, each with its arguments."""
        worker, host, limit_s = f"{self.name} rank {self.ranks[place]}", self.hosts[place], self.limits.hang_s(phase)
        references = [host.call.remote(method, phase, limit_s, *own) for method, own in methods]
        return Call((worker,) * len(references), phase, tuple(references), limit_s)

    def call_beside(self, place: int, method: str, *arguments: Any, phase: str) -> Call:
        """Call a method of one worker concurrently with its other calls."""
        reference = self.hosts[place].call_beside.remote(method, *arguments)
        return Call((f"{self.name} rank {self.ranks[place]}",), phase, (reference,), self.limits.hang_s(phase))

    def addresses(self, timeout_s: float) -> list[tuple[str, int]]:
        """Return the IP address and a free port of each worker and follower."""
        asked = [process.free_port.remote() for _, _, process in self._started()]
        return wait(self._start_call(asked), timeout_s=timeout_s)

    def peak_memory(self) -> list[int]:
        """Return each worker's peak resident memory in bytes."""
        return wait(self._as_call("memory", [host.peak_memory.remote() for host in self.hosts]))

    def begin_profile(self, tool: profiling.Tool) -> Call:
        return self._as_call("profile", [host.begin_profile.remote(tool) for host in self.hosts], self.limits.most_s)

    def end_profile(self, folder: Path, suffix: str) -> Call:
        """Write the traces to `<folder>/<name>-<rank><suffix>`."""
        files = [str(folder / f"{self.name}-{rank}{suffix}") for rank in self.ranks]
        ended = [host.end_profile.remote(file) for host, file in zip(self.hosts, files, strict=True)]
        return self._as_call("profile", ended, self.limits.most_s)

    def _started(self) -> list[tuple[int, int, Any]]:
        """Return workers and followers: rank, slot and process."""
        size = self._slots_per_host
        return [
            (rank, index, process)
            for rank, place in zip(self.ranks, self.places, strict=True)
            for index, process in enumerate(place)
            if index % size == 0
        ]

    def _start_call(self, references: list[Any]) -> Call:
        names = tuple(_name(self.name, rank, index) for rank, index, _ in self._started())
        return Call(names, START, tuple(references))

    def _as_call(
        self, phase: str, references: list[Any], limit_s: float | None = None, limits: PhaseLimits | None = None
    ) -> Call:
        workers = tuple(f"{self.name} rank {rank}" for rank in self.ranks)
        return Call(workers, phase, tuple(references), limit_s, limits)


def _name(group: str, rank: int, slot: int) -> str:
    return f"{group} rank {rank}" + (f" slot {slot}" if slot else "")


class StepProfiler:
    """Traces the steps in `profile.steps`, in the launcher and every worker: `profile/step-<step>/<worker>.json.gz`."""

    def __init__(self, config: ProfileConfig, run_folder: Path, groups: Callable[[], Sequence[WorkerGroup]]):
        """`groups`: returns the workers that live."""
        self._config, self._folder, self._groups = config, run_folder / profiling.FOLDER, groups

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Trace the block if the step is configured. Nothing is written if the block raises."""
        if step not in self._config.steps:
            yield
            return
        folder, done, groups = self._folder / f"step-{step:08d}", False, self._groups()
        wait(*(group.begin_profile(self._config.tool) for group in groups))
        profiling.begin(self._config.tool, on_device=False)
        try:
            yield
            done = True
        finally:
            profiling.end(folder / f"{profiling.DRIVER}{profiling.SUFFIX}" if done else None)
            if done:
                wait(*(group.end_profile(folder, profiling.SUFFIX) for group in groups))
