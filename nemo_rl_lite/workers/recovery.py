"""Keeps engines running: restarts those that died or whose settings have changed, and adds or ends some."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from threading import RLock, Thread
from typing import Any

from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.interface import Decoded
from nemo_rl_lite.generation.mismatch import MismatchBudget
from nemo_rl_lite.generation.queue import RequestQueue
from nemo_rl_lite.observability.liveness import limited
from nemo_rl_lite.workers.budget import RestartBudget
from nemo_rl_lite.workers.generation import RemoteGeneration
from nemo_rl_lite.workers.rollouts import RolloutWorkers
from nemo_rl_lite.workers.weight_sync import WeightSync

log = logging.getLogger(__name__)

MakeQueue = Callable[
    [Callable[[int, WorkerError], None], Callable[[], None], Callable[[WorkerError], None]],
    RequestQueue | RolloutWorkers,
]
# Seconds between two looks at starting engines.
_LOOK_S = 0.5


@dataclass(frozen=True)
class EngineRules:
    """Rules about the engines that a run needs."""

    least: int
    """Number of engines without which no refit begins."""
    at_once: bool
    """Lost engines restart at once. Otherwise the policy uses their devices, and they restart between two phases."""
    requested: Callable[[], int | None] = lambda: None
    """Returns the number of engines that a user has requested."""


class RecoveringGeneration:
    """`Generation` with refits, whose engines come and go.

    The other engines take over the requests of a dead engine. It restarts in a thread and takes requests again when it
    has the policy's weights. A refit waits until at least `rules.least` engines live. A restart that fails is raised as
    the loss if too few engines are left. Engines above the mismatch budget restart before the next refit.
    """

    def __init__(
        self,
        generation: RemoteGeneration,
        weights: WeightSync,
        start: Callable[[WorkerGroup], None],
        mismatch: MismatchBudget,
        budget: RestartBudget,
        make_queue: MakeQueue,
        policy_waits: bool,
        say: Callable[[str], None],
        rules: EngineRules,
        starting: Mapping[int, Callable[[], object]],
    ):
        """Set up the recovery.

        Args:
            start: starts engines with the settings of `mismatch` in empty processes.
            mismatch: decides on the settings of the engines.
            budget: counts restarts of engines and rollout workers. Engines that restart together count once.
            make_queue: creates the queue of requests, with `on_loss` and `restore` of `RequestQueue`, and a function
                that is called when a rollout worker dies.
            policy_waits: the policy is idle during generation and can send weights at any time. Otherwise requests wait
                for the next refit when the last engine has died.
            starting: functions that wait for the engines that have not started yet, by rank.
        """
        self._generation, self._weights, self._start = generation, weights, start
        self._budget, self._say, self._rules = budget, say, rules
        self.mismatch, self._settings = mismatch, mismatch.settings
        restore = self._restore if policy_waits else lambda: None
        self.queue = make_queue(self._note_loss, restore, self._note_lost_worker)
        # The queue's thread notes losses.
        self._lock = RLock()
        self._lost: dict[int, WorkerError] = {}
        self._starting: dict[int, _Start] = {rank: _Start(work) for rank, work in starting.items()}
        # Engines that live and do not have requests yet, and those that ended on request or may not restart.
        self._new: set[int] = set()
        self._off: set[int] = set()
        self._asked: int | None = None
        self._restart = ""
        # `queue.busy_s` at the last `take_decoded` and at the last `finish_generation`.
        self._taken_s = self._finished_s = 0.0
        # `queue.taken_over` and `queue.repeated` at the last `take_recovered`.
        self._recovered_before = 0, 0

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """Accept requests or, with rollout workers, groups."""
        return self.queue.serving()

    def finish_generation(self) -> dict[str, float]:
        """End the generation phase. Restart engines that died in the rollout and share the policy's devices."""
        if not self._rules.at_once or not self._generation.live:
            self._await_engines()
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
        """Wait until enough engines live, and refit all of them. First restart them if their settings have changed."""
        changed = self._settings is not self.mismatch.settings
        if changed:
            self._restart_all()
        self._await_engines()
        metrics = self._persist(lambda: self._weights.refit(version))
        self._hand_over()
        return metrics | ({"fell_back": 1.0} if changed else {})

    @property
    def live(self) -> WorkerGroup:
        """Return the engines that live."""
        return self._generation.group.part(self._generation.live)

    def admit(self) -> None:
        """Refit engines that have started since the last refit, and give them requests. The policy must be idle, with
        the weights of the last refit."""
        self._follow_request()
        for rank in self._take_started():
            try:
                self._weights.refit(self._weights.version, self._generation.only([rank]))
            except WorkerError as error:
                if not error.lost or not self._generation.group.part([rank]).lost():
                    raise
                self._lose([rank], error)
        self._hand_over()

    @property
    def _running(self) -> list[int]:
        """Return the engines that live or will."""
        return sorted({*self._generation.live, *self._starting, *self._lost})

    # Losses.

    def _note_loss(self, rank: int, error: WorkerError) -> None:
        """Record a lost engine. Raises the error if too few engines are left and none may restart."""
        # Otherwise the loss is known, or the engine ended on request.
        if rank in self._generation.live:
            self._lose([rank], error)

    def _lose(self, ranks: Sequence[int], error: WorkerError, during_start: bool = False) -> None:
        with self._lock:
            left = [rank for rank in self._generation.live if rank not in ranks]
            try:
                if during_start or not self._lost:
                    self._restart = self._budget.take(error)
            except WorkerError:
                if len(left) + len(self._starting) < self._rules.least:
                    raise
                self._say(f"{error}; no restart is left, and the run continues without it")
                self._off |= set(ranks)
            else:
                self._lost |= dict.fromkeys(ranks, error)
                when = f"now ({self._restart})" if self._rules.at_once else "before the next refit"
                if left:
                    self._say(f"{error}; other engines take over its requests, and it restarts {when}")
                if self._rules.at_once:
                    self._begin(ranks)
            self._generation.live = left
            self._new -= set(ranks)

    def _note_lost_worker(self, error: WorkerError) -> None:
        """Count the restart of a rollout worker. Raises the error if no restart is left."""
        self._say(f"{error}; restarting it, and its episodes are sampled again ({self._budget.take(error)})")

    def _restore(self) -> None:
        """Restart all engines in the middle of a rollout."""
        self.refit(self._weights.version)

    def _persist[Result](self, call: Callable[[], Result]) -> Result:
        while True:
            before = self._generation.live
            try:
                return call()
            except WorkerError as error:
                # A lost policy rank cannot be replaced here.
                live = self._generation.live
                lost = self._generation.group.part(live).lost() if error.lost else []
                if lost:
                    self._lose(lost, error)
                elif not error.lost or not set(before) - set(live):
                    raise
                # Otherwise the rollout's thread has noted the loss.
                if not self._rules.at_once or not self._generation.live:
                    self._await_engines()

    # Starts.

    def _begin(self, ranks: Sequence[int]) -> None:
        """Start engines in new processes."""
        group = self._generation.group.replace(ranks)
        start = _Start(lambda: self._start(group))
        self._starting |= dict.fromkeys(ranks, start)
        self._off -= set(ranks)

    def _restart_all(self) -> None:
        """Restart all engines with their new settings. If they do not start, all workers restart."""
        self._settings = self.mismatch.settings
        self._weights.make_room()
        with self._lock:
            running, self._generation.live = self._running, []
            self._new.clear()
            for rank in running:
                self._begin([rank])
        try:
            self._await_engines()
        except WorkerError as error:
            error.is_transient = True
            raise

    def _await_engines(self) -> None:
        """Wait until enough engines live. Those that have started are part of the next refit."""
        self._follow_request()
        while True:
            with self._lock:
                if waiting := sorted(rank for rank in self._lost if rank not in self._starting):
                    error = self._lost[waiting[0]]
                    self._say(f"{error}; restarting it ({self._restart})")
                    self._begin(waiting)
            if (started := self._take_started()) and not self._rules.at_once:
                # On the policy's device, a new engine sleeps until the refit wakes it.
                self._generation.only(started).finish_generation()
            with self._lock:
                pending = [start.future for start in self._starting.values()]
            if len(self._generation.live) >= self._rules.least or not pending:
                return
            with limited("waiting for engines, whose starts have their own limit", None):
                wait_for(pending, _LOOK_S, FIRST_COMPLETED)

    def _take_started(self) -> list[int]:
        """Count the engines that have started since the last call among those that live, and return them. Raises the
        loss of an engine that cannot start if too few are left."""
        with self._lock:
            ended = {rank: start for rank, start in self._starting.items() if start.done}
            for rank, start in ended.items():
                del self._starting[rank]
                if (failure := start.error) is None:
                    continue
                self._say(f"the start of generation rank {rank} failed: {failure}")
                if len(self._generation.live) + len(self._starting) < self._rules.least:
                    raise self._lost.get(rank, failure) from failure
                self._lose([rank], failure, during_start=True)
            started = sorted(rank for rank, start in ended.items() if start.error is None)
            self._generation.live = sorted({*self._generation.live, *started})
            self._new |= set(started)
        if started:
            self._weights.disconnect()
        return started

    def _hand_over(self) -> None:
        """Let the queue use the engines that are new and have weights."""
        with self._lock:
            new, self._new = sorted(self._new), set()
            restarted = [rank for rank in new if self._lost.pop(rank, None) is not None]
        if not new:
            return
        self._generation.renew(new)
        self.queue.replaced(new)
        names, live = ", ".join(map(str, new)), len(self._generation.live)
        what = "the engine has restarted" if restarted else "started"
        self._say(f"{what}: generation rank {names} ({live} of {self._generation.engines} engines run)")

    def _follow_request(self) -> None:
        """End or start engines if a user has requested another number of them."""
        asked = self._rules.requested()
        if asked is None or asked == self._asked:
            return
        self._asked, wanted = asked, max(asked, self._rules.least)
        with self._lock:
            running = self._running
            ended, begun = running[wanted:], sorted(self._off)[: max(wanted - len(running), 0)]
            self._generation.live = [rank for rank in self._generation.live if rank not in ended]
            for rank in ended:
                self._lost.pop(rank, None)
                self._starting.pop(rank, None)
            self._new -= set(ended)
            self._off |= set(ended)
            self._generation.group.end(ended)
            for rank in begun:
                self._begin([rank])
        self._say(f"requested number of engines: {wanted} ({len(ended)} end, {len(begun)} start)")


class _Start:
    """The start of engines, in a thread."""

    def __init__(self, work: Callable[[], object]):
        self.future = Future[None]()

        def run() -> None:
            try:
                work()
            except Exception as error:  # raised by the main thread
                self.future.set_exception(error)
            else:
                self.future.set_result(None)

        # The launcher's end does not wait for it.
        Thread(target=run, daemon=True, name="engine start").start()

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def error(self) -> WorkerError | None:
        """Return the error of a start that is done. Raises an error that is not a WorkerError."""
        error = self.future.exception()
        if error is not None and not isinstance(error, WorkerError):
            raise error
        return error
