"""Restart an engine that died, refit it from the policy, and repeat the call that was lost."""

import time
from collections.abc import Callable
from typing import TypeVar

from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.run.workers.remote_generation import RemoteGeneration
from nemo_rl_lite.run.workers.weight_sync import WeightSync

Result = TypeVar("Result")


class RecoveringGeneration:
    """`Generation` with refits, whose engines may die `max_restarts` times before the run itself restarts.

    After a loss, all engines generate all prompts of the call again with the same seeds, so the result is the same. If
    a new engine does not fit on its device next to what is there now, the loss is an error like that of other workers.
    """

    def __init__(
        self,
        generation: RemoteGeneration,
        weights: WeightSync,
        start: Callable[[WorkerGroup], None],
        max_restarts: int,
        say: Callable[[str], None],
    ):
        """`start` starts engines in a group of empty processes."""
        self._generation, self._weights, self._start = generation, weights, start
        self._left, self._say = max_restarts, say

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        return self._persist(lambda: self._generation.generate(prompts, sampling), needs_weights=True)

    def finish_generation(self) -> dict[str, float]:
        return self._persist(self._generation.finish_generation, needs_weights=True)

    def refit(self) -> dict[str, float]:
        """See `WeightSync.refit`."""
        return self._persist(self._weights.refit, needs_weights=False)

    def _persist(self, call: Callable[[], Result], needs_weights: bool) -> Result:
        while True:
            try:
                return call()
            except WorkerError as error:
                # The lost worker may be a policy rank.
                lost = self._generation.group.lost() if error.lost and self._left else []
                if not lost:
                    raise
                self._left -= 1
                self._recover(lost, error)
            if needs_weights:
                self.refit()

    def _recover(self, lost: list[int], error: WorkerError) -> None:
        started = time.monotonic()
        self._say(f"{error}; restarting it ({self._left} more restarts allowed, cluster.max_restarts)")
        try:
            self._start(self._generation.group.replace(lost))
            # A new engine is awake. If it shares the policy's device, it sleeps until the refit wakes it.
            self._generation.finish_generation()
            self._weights.connect()
        except WorkerError as failure:
            self._say(f"the restart failed: {failure}")
            raise error from failure
        self._say(f"the engine is back after {time.monotonic() - started:.1f} s")
