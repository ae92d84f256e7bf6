"""Scripted engines and policy ranks in Ray actors, and clients that keep engines full. Nothing is computed: a step of
an engine sleeps, and its responses are parts of one long response.
"""

import asyncio
import math
import pickle
import random
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import ray

from nemo_rl_lite.cluster.actor import ListenedProcess
from nemo_rl_lite.cluster.calls import Call
from nemo_rl_lite.cluster.limits import PhaseLimits
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.generation.interface import (
    CacheUse,
    Completion,
    Decoded,
    EngineLoad,
    EngineReport,
    Request,
    Sampling,
    Unfinished,
)
from nemo_rl_lite.generation.loop import EngineLoop
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.losses.batch import TokenRows
from nemo_rl_lite.workers.generation import RemoteReplica
from nemo_rl_lite.workers.rollout_worker import RolloutWorker

# Requests in flight of an engine, engines of a bank, and the size of the vocabulary.
IN_FLIGHT, BANK, VOCABULARY = 256, 64, 150_000
# Maximum tokens of a response.
LONGEST = 65_536


@dataclass(frozen=True)
class Script:
    """Steps and responses of scripted engines."""

    step_s: float
    """Time of a step, during which the engine's thread sleeps."""
    burst: int
    """Tokens that each request gets in a step."""
    mean: int = 0
    """Mean of exponentially distributed lengths, so that the load never changes; 0: the requested maximum lengths."""
    experts: tuple[int, int] | None = None
    """Layers, and experts per token, of a model whose routed experts are reported."""


class ScriptedEngine:
    """An `Engine` whose steps sleep, without the GIL, as a GPU works."""

    version, max_length = 0, LONGEST

    def __init__(self, script: Script):
        self._step, self._decoded = 0, Decoded()
        self.follow(script)
        # Requests by number, with the length of their responses; steps before each and its reported tokens; and the
        # numbers that end in a step.
        self._held: dict[int, tuple[Request, int]] = {}
        self._told: dict[int, tuple[int, int]] = {}
        self._ends: dict[int, list[int]] = defaultdict(list)

    def follow(self, script: Script) -> None:
        """Change the script, while the engine has no requests."""
        self._script, self._longest = script, _longest_response(script.experts)

    def submit(self, requests: Mapping[int, Request]) -> None:
        for number, request in requests.items():
            most, mean = request.sampling.max_new_tokens, self._script.mean
            drawn = math.ceil(random.Random(request.seed).expovariate(1 / mean)) if mean else most
            length = min(drawn, most)
            self._held[number], self._told[number] = (request, length), (self._step, 0)
            self._ends[self._step + math.ceil(length / self._script.burst)].append(number)

    def step(self) -> dict[int, Completion]:
        time.sleep(self._script.step_s)
        share = len(self._held) / IN_FLIGHT
        self._decoded += Decoded(1, cache=CacheUse(share, share))
        self._step += 1
        numbers = [number for number in self._ends.pop(self._step, ()) if number in self._held]
        return {number: self._completion(*self._take(number)) for number in numbers}

    def _take(self, number: int) -> tuple[Request, int]:
        self._told.pop(number)
        return self._held.pop(number)

    def _completion(self, request: Request, length: int) -> Completion:
        longest, experts = self._longest, self._longest.routed_experts
        return Completion(
            longest.tokens[:length],
            longest.logprobs[:length],
            "length",
            ((self.version, length),),
            None if experts is None else experts[: len(request.prompt) + length - 1],
        )

    def new_tokens(self, of_all: bool) -> dict[int, Unfinished]:
        longest, found = self._longest, {}
        for number in [number for number, (request, _) in self._held.items() if of_all and request.continues]:
            began, told = self._told[number]
            own = slice(told, (self._step - began) * self._script.burst)
            versions = ((self.version, own.stop - told),)
            found[number] = Unfinished(longest.tokens[own], longest.logprobs[own], "length", versions)
            self._told[number] = began, own.stop
        return found

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._held))

    def abort(self, numbers: Sequence[int]) -> None:
        for number in self._held.keys() & set(numbers):
            self._take(number)

    def take_decoded(self) -> Decoded:
        taken, self._decoded = self._decoded, Decoded()
        return taken


@cache
def _longest_response(experts: tuple[int, int] | None) -> Completion:
    draw = random.Random(0)
    tokens = tuple(draw.randrange(1, VOCABULARY) for _ in range(LONGEST))
    logprobs, versions = tuple(-draw.random() for _ in range(LONGEST)), ((ScriptedEngine.version, LONGEST),)
    if experts is None:
        return Completion(tokens, logprobs, "length", versions)
    chosen = np.random.default_rng(0).integers(0, 128, (LONGEST, *experts), np.uint8)
    return Completion(tokens, logprobs, "length", versions, chosen)


@dataclass(frozen=True)
class Work:
    """Work of an engine in a time."""

    wall_s: float
    stepping_s: float
    steps: int
    in_flight: float
    """Mean number of requests in flight, as a share of `IN_FLIGHT`."""


class EngineBank:
    """Many engines, each in its own `EngineLoop`, in one process."""

    def __init__(self, count: int, script: Script):
        make: Any = partial(ScriptedEngine, script)
        self._loops = [EngineLoop(make) for _ in range(count)]
        self._taken_s = [time.monotonic()] * count
        self._bytes = 0

    def send(self, engine: int, requests: Mapping[int, Request], aborted: Sequence[int]) -> None:
        self._loops[engine].send(requests, aborted)

    def report(self, engine: int) -> EngineReport:
        return self._loops[engine].report()

    def clear(self, engine: int) -> None:
        self._loops[engine].clear()

    def follow(self, script: Script) -> None:
        """Change the script of idle engines."""
        for loop in self._loops:
            loop.call("follow", script)

    def work(self) -> list[Work]:
        """Return the work of each engine since the last call."""
        with ThreadPoolExecutor(len(self._loops)) as threads:
            return list(threads.map(self._work, range(len(self._loops))))

    def _work(self, engine: int) -> Work:
        decoded, before = self._loops[engine].take_decoded(), self._taken_s[engine]
        self._taken_s[engine] = time.monotonic()
        share = decoded.cache.total / max(decoded.steps, 1)
        return Work(self._taken_s[engine] - before, decoded.seconds, decoded.steps, share)


_OPTIONS: Any = {"num_cpus": 0, "concurrency_groups": {"beside": BANK + 1}}
_BankActor: Any = ray.remote(**_OPTIONS)(ListenedProcess)


class BankGroup(WorkerGroup):
    """Banks, whose processes have a waiting call for each engine."""

    def _new_place(self, rank: int) -> list[Any]:
        self._actor = _BankActor
        return super()._new_place(rank)


class CountingBank(EngineBank):
    """Counts the bytes of messages."""

    def send(self, engine: int, requests: Mapping[int, Request], aborted: Sequence[int]) -> None:
        self._bytes += _pickled_bytes((requests, aborted))
        super().send(engine, requests, aborted)

    def report(self, engine: int) -> EngineReport:
        report = super().report(engine)
        self._bytes += _pickled_bytes(report)
        return report

    def take_bytes(self) -> int:
        """Return the bytes of messages since the last call."""
        taken, self._bytes = self._bytes, 0
        return taken


class CountingPolicy:
    """A policy rank that only counts the bytes of its batches."""

    def place(self) -> Any:
        from nemo_rl_lite.policy.interface import ParallelPlace

        return ParallelPlace(data_rank=0, data_size=1, tensor_rank=0, has_logits=True, is_whole=True)

    def put_batch(self, rows: TokenRows, name: str) -> None:
        self._bytes = _pickled_bytes(rows)

    def put_parts(self, name: str, order: Sequence[int], *parts: TokenRows) -> None:
        """Count the message of the launcher, which has no rows."""
        self._bytes = _pickled_bytes((name, order))

    def take_bytes(self) -> int:
        """Return the bytes of the last batch."""
        return self._bytes


class CountingWorker(RolloutWorker):
    """A rollout worker that counts the bytes of its messages to and from the launcher."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self._bytes = 0

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in ("play", "stop", "report", "rows", "write", "written", "release", "leave"):
            return method

        def counted(*arguments: Any) -> Any:
            found = method(*arguments)
            self._bytes += _pickled_bytes(arguments)
            # References to rows have about 28 bytes.
            self._bytes += _pickled_bytes([[b"r" * 28] * len(own) for own in found] if name == "rows" else found)
            return found

        return counted

    def take_bytes(self) -> int:
        """Return the bytes of messages since the last call."""
        taken, self._bytes = self._bytes, 0
        return taken


def _pickled_bytes(message: Any) -> int:
    return len(pickle.dumps(message, protocol=5))


@dataclass(frozen=True)
class Seat:
    """One engine of a bank. Stands in for a `WorkerGroup` with one process per engine, as `RemoteReplica` uses it."""

    group: WorkerGroup
    place: int
    engine: int

    @property
    def limits(self) -> PhaseLimits:
        return self.group.limits

    def call_one(self, place: int, methods: Sequence[tuple[str, tuple[Any, ...]]], phase: str) -> Call:
        own = [(method, (self.engine, *arguments)) for method, arguments in methods]
        return self.group.call_one(self.place, own, phase)

    def call_beside(self, place: int, method: str, *arguments: Any, phase: str) -> Call:
        return self.group.call_beside(self.place, method, self.engine, *arguments, phase=phase)

    def replica(self) -> RemoteReplica:
        return RemoteReplica(self, self.place * BANK + self.engine)  # pyrefly: ignore


class FullQueues:
    """Clients of engines, each of which always has `IN_FLIGHT` requests or waits for them. Runs in its own process."""

    def __init__(self, queues: Sequence[Sequence[Seat]]):
        self._failure: BaseException | None = None
        self._queues = queues
        threading.Thread(target=self._run, name="queues", daemon=True).start()

    def cpu_s(self) -> float:
        """Return the CPU time of this process. Raises what has ended the clients."""
        if self._failure is not None:
            raise self._failure
        return time.process_time()

    def _run(self) -> None:
        async def serve_all() -> None:
            await asyncio.gather(*(self._keep_full(number, seats) for number, seats in enumerate(self._queues)))

        try:
            asyncio.run(serve_all())
        except BaseException as error:  # raised by the next call
            self._failure = error

    async def _keep_full(self, number: int, seats: Sequence[Seat]) -> None:
        sampling, prompt = Sampling(1.0, 1.0, None, LONGEST, (), ()), tuple(range(1000, 1300))
        draw = random.Random(number)

        async def ask_again() -> None:
            while True:
                await queue.sample(Request(prompt, sampling, draw.getrandbits(32), continues=True))

        replicas = [seat.replica() for seat in seats]
        async with RequestQueue(replicas, IN_FLIGHT, raise_loss, raise_loss).serving() as queue:
            with queue.submit_as_batch():
                asked = [asyncio.create_task(ask_again()) for _ in range(IN_FLIGHT * len(seats))]
                await asyncio.sleep(0)
            await asyncio.gather(*asked)


def raise_loss(*lost: Any) -> None:
    """End the measurement, because no engine should be lost."""
    raise RuntimeError(f"an engine was lost: {lost}")
