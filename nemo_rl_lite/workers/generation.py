"""Clients of generation engines in Ray actors, for the request queue and for refits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from nemo_rl_lite.cluster.calls import Call, result, wait
from nemo_rl_lite.cluster.heartbeat import hang
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.errors import EngineError, WorkerError
from nemo_rl_lite.generation.interface import Completion, Decoded, EngineLoad, Request, RequestError
from nemo_rl_lite.refit.engine import Source
from nemo_rl_lite.refit.ipc import SharedWeights
from nemo_rl_lite.refit.trace import Recipe
from nemo_rl_lite.refit.windows import Piece, WindowRoutes

# Phase of an engine's own steps in `PhaseLimits`.
_STEP = "engine step"


@dataclass
class RemoteReplica:
    """A `generation.queue.Replica` over one engine."""

    group: WorkerGroup
    """The engine's processes alone. New ones get no requests until they are set here."""
    rank: int
    """Rank of the engine among all."""
    load: EngineLoad = field(default_factory=EngineLoad)
    steps: int = 0

    async def send(self, requests: Mapping[int, Request], aborted: Sequence[int]) -> None:
        """See `EngineLoop.send`. Raises WorkerError: the engine failed, died or hangs."""
        await self._call("send", requests, aborted)

    async def report(self) -> Mapping[int, Completion | RequestError]:
        """See `EngineLoop.report`.

        Raises:
            EngineError: a sampled token's logprob is not finite.
            WorkerError: the engine failed or died, or a step does not end.
        """
        call = self.group.call_beside(0, "report", phase="generate")
        [report] = await result(call)
        limits = self.group.limits
        limit_s = limits.hang_s(_STEP)
        if limit_s is not None and report.stuck_s > limit_s:
            raise hang(call.workers, call.phase, f"its step is not done within {limit_s:g} s")
        if report.steps > self.steps:
            limits.note(_STEP, report.longest_s)
        self.load, self.steps = report.load, report.steps
        for completion in report.finished.values():
            if isinstance(completion, Completion):
                _require_finite(self.rank, completion)
        return report.finished

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def clear(self) -> None:
        """Abort the requests of an earlier queue."""
        await self._call("clear")

    async def _call(self, method: str, *arguments: Any) -> None:
        await result(self.group.call_one(0, [(method, arguments)], "generate"))


class RemoteGeneration:
    """Client of the engines of a group. Calls reach those of `live`, in this order."""

    def __init__(self, group: WorkerGroup, shares_device: bool, live: Sequence[int] | None = None):
        """`live`: ranks of the engines that have started; None: all."""
        self.group, self._shares_device = group, shares_device
        self.live = list(range(len(group)) if live is None else live)
        self._decoded = Decoded()

    @property
    def engines(self) -> int:
        """Return the number of engines, whether they live or not."""
        return len(self.group)

    @cached_property
    def replicas(self) -> list[RemoteReplica]:
        return [RemoteReplica(self.group.part([rank]), rank) for rank in range(self.engines)]

    def renew(self, ranks: Sequence[int]) -> None:
        """Send requests to the new processes of these engines."""
        for rank in ranks:
            self.replicas[rank].group = self.group.part([rank])

    def only(self, ranks: Sequence[int]) -> "RemoteGeneration":
        """Return a client of these engines."""
        return RemoteGeneration(self.group, self._shares_device, ranks)

    def start_probe(self, request: Request) -> dict[int, Call]:
        """Make every engine sample the request, each with its own seed, before later requests."""
        asked = {rank: ("sample_now", replace(request, seed=request.seed + rank)) for rank in self.live}
        return {rank: self.group.call_one(rank, [("call", own)], "generate") for rank, own in asked.items()}

    def collect_probe(self, begun: Mapping[int, Call]) -> dict[int, Completion]:
        """Return the responses of `start_probe` by engine. Engines that have died are left out, because other calls
        report them.

        Raises:
            EngineError: a sampled token's logprob is not finite.
            WorkerError: an engine failed or hangs.
        """
        found: dict[int, Completion] = {}
        for rank, call in begun.items():
            try:
                [found[rank]] = wait(call)
            except WorkerError as error:
                if not error.lost:
                    raise
                continue
            _require_finite(rank, found[rank])
        return found

    def finish_generation(self) -> dict[str, float]:
        """Put engines that share a GPU with the policy to sleep; return memory metrics from before."""
        answers = wait(self._call("memory"), self.group.part(self.live).call("take_decoded"))
        held = max(answers[: len(self.live)], key=lambda own: own.get("device", 0))
        self._decoded = sum(answers[len(self.live) :], self._decoded)
        wait(self._call("sleep"))
        return engine_memory(held, self._shares_device) if held else {}

    def take_decoded(self) -> Decoded:
        """Return the engines' work up to the last `finish_generation`, since the last call."""
        taken, self._decoded = self._decoded, Decoded()
        return taken

    def weight_bytes(self) -> int:
        """Return the largest bytes of weights on an engine's GPU; 0 on CPUs."""
        return max(held.get("generation_weights", 0) for held in wait(self._call("memory")))

    def share_weights(self) -> list[SharedWeights]:
        """Return the shared weights of all ranks, engine by engine; see `ipc.share_weights`."""
        return [rank for engine in wait(self._call("share_weights")) for rank in engine]

    def wake_weights(self) -> None:
        wait(self._call("wake_weights"))

    def wake_cache(self) -> None:
        wait(self._call("wake_cache"))

    def join_refit(self, sources: Sequence[Sequence[Source]]) -> Call:
        """Connect each engine's ranks to their producers; ends after the producers' `join_refit`."""
        arguments = [("join_refit", own) for own in sources]
        return self.group.part(self.live).call_each("call", arguments, phase="join_refit")

    def needed_pieces(self, recipe: Recipe) -> list[Sequence[Piece] | None]:
        """Return what each rank of the first engine of `live` copies; see `Engine.needed_pieces`. All are alike."""
        return wait(self._call("needed_pieces", recipe))[0]

    def join_windows(self, routes: Sequence[Sequence[WindowRoutes]]) -> Call:
        """Join the policy for the transfers of each engine's ranks; ends after the policy's `join_windows`."""
        arguments = [("join_windows", own) for own in routes]
        return self.group.part(self.live).call_each("call", arguments, phase="join_windows")

    def receive_weights(self, version: int) -> Call:
        """Receive new weights; ends after the producers' `send_weights`."""
        return self._call("receive_weights", version, phase="refit")

    def _call(self, method: str, *arguments: Any, phase: str = "") -> Call:
        """Call a method of every engine between two of its steps."""
        return self.group.part(self.live).call("call", method, *arguments, phase=phase or method)


def _require_finite(rank: int, completion: Completion) -> None:
    """Raise EngineError if a sampled token's logprob is not finite."""
    wrong = np.flatnonzero(~np.isfinite(completion.logprobs))
    if len(wrong):
        place = wrong[0]
        raise EngineError(
            f"generation rank {rank} sampled token {completion.tokens[place]} (position {place + 1} of its response) "
            f"with logprob {completion.logprobs[place]}: its weights or activations are not finite"
        )


def engine_memory(held: Mapping[str, int], shares_device: bool) -> dict[str, float]:
    """Convert an engine's `memory()` to metrics: components of the generation and refit phases on a shared device,
    otherwise `engine/<name>`."""
    if not shares_device:
        return {f"engine/{name}": float(nbytes) for name, nbytes in held.items()}
    weights = float(held["generation_weights"])
    return {
        "device_bytes/generate": float(held["device"]),
        "measured/generate/generation_weights": weights,
        "measured/generate/kv_cache": float(held["kv_cache"]),
        "measured/refit/generation_weights": weights,
    }
