"""Restart engines that died, and continue with their requests."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.interface import Decoded
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.workers.generation import RemoteGeneration
from nemo_rl_lite.workers.weight_sync import WeightSync


class RecoveringGeneration:
    """`Generation` with refits, whose engines may die `max_restarts` times before the run itself restarts.

    The other engines take over the requests of one that died in a rollout. It comes back before the next refit, or
    immediately if it was the last one and the policy waits for the rollout. If a new engine does not fit on its
    device now, the loss is an error like that of other workers.
    """

    def __init__(
        self,
        generation: RemoteGeneration,
        weights: WeightSync,
        start: Callable[[WorkerGroup], None],
        max_restarts: int,
        capacity: int,
        policy_waits: bool,
        say: Callable[[str], None],
    ):
        """`start` starts engines in empty processes. `capacity`: requests that an engine may hold.

        `policy_waits`: the policy is idle while engines generate, and can give new engines weights at any time.
        Otherwise, when the last engine has died, requests wait for the next refit.
        """
        self._generation, self._weights, self._start = generation, weights, start
        self._left, self._say = max_restarts, say
        self.queue = RequestQueue(
            generation.replicas, capacity, self._note_loss, self._restore if policy_waits else lambda: None
        )
        self._lost: dict[int, WorkerError] = {}
        # Of `queue.busy_s`: what the last `take_decoded` has covered, and the last `finish_generation`.
        self._taken_s = self._finished_s = 0.0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RequestQueue]:
        """See `Generation.serving`."""
        async with self.queue.serving() as queue:
            yield queue

    def finish_generation(self) -> dict[str, float]:
        """See `Generation.finish_generation`. Engines that died in the rollout are restarted."""
        self._replace_lost()
        memory = self._persist(self._generation.finish_generation)
        self._finished_s = self.queue.busy_s
        return memory

    def take_decoded(self) -> tuple[Decoded, float]:
        """Return what the living engines have decoded, and the seconds in which they had requests, summed over them.
        Both are of the rollouts that have ended (`finish_generation`) since the last call."""
        seconds, self._taken_s = self._finished_s - self._taken_s, self._finished_s
        return self._generation.take_decoded(), seconds

    def refit(self, version: int) -> dict[str, float]:
        """See `WeightSync.refit`. Engines that died in the rollout are restarted."""
        self._replace_lost()
        return self._persist(lambda: self._weights.refit(version))

    def _note_loss(self, rank: int, error: WorkerError) -> None:
        """Record a loss. Raises the error if no restart is left."""
        if not self._left:
            raise error
        self._left -= 1
        self._lost[rank] = error
        if len(self._lost) < self._generation.engines:
            self._say(f"{error}; the other engines take over its requests, and it restarts before the next refit")

    def _restore(self) -> None:
        """Bring all engines back in the middle of the rollout."""
        self._replace_lost()
        self.refit(self._weights.version)

    def _persist[Result](self, call: Callable[[], Result]) -> Result:
        while True:
            try:
                return call()
            except WorkerError as error:
                # The lost worker may be a policy rank.
                lost = self._generation.group.lost() if error.lost and self._left else []
                if not lost:
                    raise
                self._left -= 1
                self._lost |= dict.fromkeys(lost, error)
                self._replace_lost()

    def _replace_lost(self) -> None:
        if not self._lost:
            return
        started, error = time.monotonic(), next(iter(self._lost.values()))
        self._say(f"{error}; restarting it ({self._left} more restarts allowed, cluster.max_restarts)")
        try:
            self._start(self._generation.group.replace(sorted(self._lost)))
            # A new engine is awake. If it shares the policy's device, it sleeps until the refit wakes it.
            self._generation.finish_generation()
            self._weights.connect()
        except WorkerError as failure:
            self._say(f"the restart failed: {failure}")
            raise error from failure
        self.queue.replaced(sorted(self._lost))
        self._lost.clear()
        self._say(f"the engine is back after {time.monotonic() - started:.1f} s")
