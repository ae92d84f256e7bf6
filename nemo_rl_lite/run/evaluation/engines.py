"""An evaluation's engines: one in this process, or several in Ray actors. Nothing trains, and weights never change."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.placement import place
from nemo_rl_lite.cluster.runtime import ray_runtime
from nemo_rl_lite.cluster.watchdog import watched
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.compat.ray import lost_process
from nemo_rl_lite.config.sizes import engines
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.generation.interface import Generation, Requests
from nemo_rl_lite.generation.request_queue import RequestQueue
from nemo_rl_lite.run.serving import Served, start_engine
from nemo_rl_lite.run.workers.remote_generation import RemoteGeneration
from nemo_rl_lite.run.workers.reserve import generation_group, load_generation, start_engines

Say = Callable[[str], None]


@dataclass(frozen=True)
class AwakeEngines:
    """`Generation` by engines that nobody shares a device with."""

    queue: RequestQueue

    def serving(self) -> AbstractAsyncContextManager[Requests]:
        return self.queue.serving()

    def finish_generation(self) -> dict[str, float]:
        return {}


@contextmanager
def running_engines(served: Served, folder: Path, say: Say) -> Iterator[Generation]:
    """Start the engines that the configuration asks for; those in actors end with the block, and their logs are in
    `folder/logs`.

    Raises:
        WorkerError: there are too few GPUs, an engine does not start, or all have died too often.
    """
    if engines(served.config) == 1:
        queue, _ = start_engine(served)
        yield AwakeEngines(queue)
        return
    with ray_runtime(), watched(_last_words, lost_process):
        yield AwakeEngines(Fleet(served, folder, say).queue)


class Fleet:
    """Engines in actors. The others take over the requests of one that dies; when none is left, all start again, at
    most `cluster.max_restarts` times."""

    def __init__(self, served: Served, folder: Path, say: Say):
        self._served, self._say = served, say
        self._left = served.config.cluster.max_restarts
        self._lost: dict[int, WorkerError] = {}
        config = served.config
        self._group = generation_group(config, place(config, engines(config)), folder)
        self._start(self._group)
        replicas = RemoteGeneration(self._group, shares_device=False).replicas
        capacity = config.generation.vllm_cfg.max_num_seqs
        self.queue = RequestQueue(replicas, capacity, self._note_loss, self._restore)

    def _start(self, group: WorkerGroup) -> None:
        config, limit = self._served.config, self._served.config.cluster.start_timeout_s
        wait(load_generation(config, group), timeout_s=limit)
        wait(start_engines(config, group, self._served.folder), timeout_s=limit)

    def _note_loss(self, rank: int, error: WorkerError) -> None:
        self._lost[rank] = error
        if len(self._lost) < len(self._group):
            self._say(f"{error}; the other engines take over its requests")

    def _restore(self) -> None:
        ranks, error = sorted(self._lost), next(reversed(self._lost.values()))
        if not self._left:
            raise error
        self._left -= 1
        self._say(f"{error}; no engine is left: starting again ({self._left} more restarts, cluster.max_restarts)")
        try:
            self._start(self._group.replace(ranks))
        except WorkerError as failure:
            self._say(f"the restart failed: {failure}")
            raise error from failure
        self.queue.replaced(ranks)
        self._lost.clear()


def _last_words(error: WorkerError) -> None:
    """What is left to say by a command that does not react any more."""
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
