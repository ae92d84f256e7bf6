"""An engine that dies while it generates is started anew, gets the policy's weights, and generates again."""

import logging
import time
from collections.abc import Callable

from nemo_rl_lite.cluster.weight_sync import WeightSync
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.generation.remote import RemoteGeneration

log = logging.getLogger(__name__)


class RecoveringGeneration:
    """`Generation` whose engines may die while they generate, `max_restarts` times in a run.

    All prompts of the call are generated again, by every engine with the seed that it had: the result is the same as if
    nothing had happened. An engine that dies in any other phase is an error.
    """

    def __init__(
        self,
        generation: RemoteGeneration,
        weights: WeightSync,
        start: Callable[[WorkerGroup], None],
        max_restarts: int,
        say: Callable[[str], None],
    ):
        """`start` brings up engines in a group of empty processes."""
        self._generation, self._weights, self._start = generation, weights, start
        self._left, self._say = max_restarts, say

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        while True:
            try:
                return self._generation.generate(prompts, sampling)
            except WorkerError as error:
                if not error.lost or not self._left:
                    raise
                self._left -= 1
                self._recover(error)

    def finish_generation(self) -> dict[str, float]:
        return self._generation.finish_generation()

    def _recover(self, error: WorkerError) -> None:
        started = time.monotonic()
        self._say(f"{error}; it is started anew ({self._left} more of cluster.max_restarts)")
        group = self._generation.group
        self._start(group.replace(group.lost()))
        self._weights.connect()
        self._weights.refit()
        self._say(f"it is back after {time.monotonic() - started:.1f} s, and its prompts are generated again")
