"""Restarts engines that died, or whose settings have changed, and continues their requests."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.schema import GenerationConfig
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.interface import Decoded
from nemo_rl_lite.generation.mismatch import MismatchBudget
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.workers.budget import RestartBudget
from nemo_rl_lite.workers.generation import RemoteGeneration
from nemo_rl_lite.workers.rollouts import RolloutWorkers
from nemo_rl_lite.workers.weight_sync import WeightSync

MakeQueue = Callable[
    [Callable[[int, WorkerError], None], Callable[[], None], Callable[[WorkerError], None]],
    RequestQueue | RolloutWorkers,
]


class RecoveringGeneration:
    """`Generation` with refits, which restarts engines that die.

    The other engines take over the requests of a dead engine. It restarts before the next refit, or at once if it was
    the last engine and the policy waits for the rollout. If the new engine does not fit on its device, the loss is
    raised like that of other workers. Engines above the mismatch budget restart before the next refit, too.
    """

    def __init__(
        self,
        generation: RemoteGeneration,
        weights: WeightSync,
        start: Callable[[WorkerGroup, GenerationConfig], None],
        mismatch: MismatchBudget,
        budget: RestartBudget,
        make_queue: MakeQueue,
        policy_waits: bool,
        say: Callable[[str], None],
    ):
        """Set up the recovery.

        Args:
            start: starts engines with some settings in empty processes.
            mismatch: has the settings of the engines.
            budget: counts restarts of engines and rollout workers. Engines that restart together count once.
            make_queue: creates the queue of requests, with `on_loss` and `restore` of `RequestQueue`, and a function
                that is called when a rollout worker dies.
            policy_waits: the policy is idle during generation and can send weights at any time. Otherwise requests wait
                for the next refit when the last engine has died.
        """
        self._generation, self._weights, self._start = generation, weights, start
        self._budget, self._say = budget, say
        self.mismatch, self._settings = mismatch, mismatch.settings
        restore = self._restore if policy_waits else lambda: None
        self.queue = make_queue(self._note_loss, restore, self._note_lost_worker)
        self._lost: dict[int, WorkerError] = {}
        self._restart = ""
        # `queue.busy_s` at the last `take_decoded` and at the last `finish_generation`.
        self._taken_s = self._finished_s = 0.0
        # `queue.taken_over` and `queue.repeated` at the last `take_recovered`.
        self._recovered_before = 0, 0

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """Accept requests or, with rollout workers, groups."""
        return self.queue.serving()

    def finish_generation(self) -> dict[str, float]:
        """End the generation phase, and restart engines that died in the rollout."""
        self._replace_lost()
        memory = self._persist(self._generation.finish_generation)
        self._finished_s = self.queue.busy_s
        return memory

    def take_decoded(self) -> tuple[Decoded, float]:
        """Return the engines' decoding work, and their summed busy seconds, in the rollouts that have ended
        (`finish_generation`) since the last call."""
        seconds, self._taken_s = self._finished_s - self._taken_s, self._finished_s
        return self._generation.take_decoded(), seconds

    def take_recovered(self) -> tuple[int, int]:
        """Return the tokens of lost engines' responses since the last call: those that other engines continue, and
        those that they sample again."""
        now, before = (self.queue.taken_over, self.queue.repeated), self._recovered_before
        self._recovered_before = now
        return now[0] - before[0], now[1] - before[1]

    def refit(self, version: int) -> dict[str, float]:
        """Restart engines that died in the rollout, or all if their settings have changed, and refit all engines."""
        self._replace_lost()
        changed = self._settings is not self.mismatch.settings
        if changed:
            self._settings = self.mismatch.settings
            self._restart_all()
        return self._persist(lambda: self._weights.refit(version)) | ({"fell_back": 1.0} if changed else {})

    def _note_loss(self, rank: int, error: WorkerError) -> None:
        """Record a lost engine. Raises the error if no restart is left."""
        if rank in self._lost:
            return
        self._count(error)
        self._lost[rank] = error
        if len(self._lost) < self._generation.engines:
            self._say(f"{error}; other engines take over its requests, and it restarts before the next refit")

    def _count(self, error: WorkerError) -> None:
        """Count the restart of the engines that are lost now. Raises the error if none is left."""
        if not self._lost:
            self._restart = self._budget.take(error)

    def _note_lost_worker(self, error: WorkerError) -> None:
        """Count the restart of a rollout worker. Raises the error if no restart is left."""
        self._say(f"{error}; restarting it, and its episodes are sampled again ({self._budget.take(error)})")

    def _restore(self) -> None:
        """Restart all engines in the middle of a rollout."""
        self._replace_lost()
        self.refit(self._weights.version)

    def _persist[Result](self, call: Callable[[], Result]) -> Result:
        while True:
            try:
                return call()
            except WorkerError as error:
                # A lost policy rank cannot be replaced here.
                lost = self._generation.group.lost() if error.lost else []
                if not lost:
                    raise
                self._count(error)
                self._lost |= dict.fromkeys(lost, error)
                self._replace_lost()

    def _replace_lost(self) -> None:
        if not self._lost:
            return
        error = next(iter(self._lost.values()))
        self._say(f"{error}; restarting it ({self._restart})")
        try:
            self._replace(sorted(self._lost))
        except WorkerError as failure:
            self._say(f"the restart failed: {failure}")
            raise error from failure
        self._lost.clear()

    def _restart_all(self) -> None:
        """Restart all engines with new settings. If they do not fit next to the policy, all workers restart."""
        self._weights.make_room()
        try:
            self._replace(range(self._generation.engines))
        except WorkerError as error:
            self._budget.take(error)
            raise

    def _replace(self, ranks: Sequence[int]) -> None:
        started = time.monotonic()
        self._start(self._generation.group.replace(ranks), self._settings)
        # On the policy's device, a new engine sleeps until the refit wakes it.
        self._generation.finish_generation()
        self._weights.connect()
        self.queue.replaced(ranks)
        which = "the engine has" if len(ranks) == 1 else f"{len(ranks)} engines have"
        self._say(f"{which} restarted after {time.monotonic() - started:.1f} s")
