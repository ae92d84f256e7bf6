"""Heartbeats of worker processes (phase, progress, stack, load), which identify a hanging worker."""

import faulthandler
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import ray

from nemo_rl_lite.compat.ray import kv_del, kv_get, kv_put
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.observability.liveness import background_work, latest_progress
from nemo_rl_lite.observability.system import Sampler, Usage

log = logging.getLogger(__name__)
PERIOD_S = 2.0
# A process without a heartbeat for this long hangs with all its threads.
SILENT_S = 5 * PERIOD_S
_FRAMES = 24


@dataclass(frozen=True)
class Heartbeat:
    """State of a worker's process at one time. Times are seconds since the epoch."""

    worker: str
    phase: str
    since: float
    at: float
    counts: dict[str, int] = field(default_factory=dict)
    stack: tuple[str, ...] = ()
    """`file:line function` of the working thread, the innermost frame last."""
    node: str = ""
    usage: Usage = field(default_factory=Usage)
    """Load of the process's machine and GPUs."""

    @property
    def waits_for_others(self) -> bool:
        """Return whether the process is in a collective operation."""
        return any("torch/distributed/" in frame for frame in self.stack[-4:])

    @property
    def progress(self) -> tuple[int, ...]:
        """Return the optimizer step and the micro-batch."""
        return tuple(self.counts.get(name, 0) for name in ("optimizer_step", "micro_batch"))

    def is_silent(self, now: float) -> bool:
        """Return whether all threads of the process hang."""
        return now - self.at > SILENT_S

    def describe(self, now: float) -> str:
        counts = "".join(f", {name.replace('_', ' ')} {count}" for name, count in self.counts.items())
        silent = f", no sign of life for {now - self.at:.0f} s" if self.is_silent(now) else ""
        where = f", at {self.stack[-1]}" if self.stack else ""
        return f"{self.worker}: {self.phase} for {now - self.since:.0f} s{counts}{silent}{where}"


class HeartbeatThread:
    """Writes this process's heartbeat to Ray's key-value store every PERIOD_S seconds.

    Also calls `beat`, if it is set: with True if the launcher wants to free the working thread (`free`).
    """

    def __init__(self, worker: str, gpus: Sequence[str] = ()):
        self._worker, self._phase, self._since = worker, "idle", time.time()
        self._limit_s: float | None = None
        self.beat: Callable[[bool], None] | None = None
        self._beating = threading.Lock()
        # A request for a process that had this name before.
        kv_del(_free_key(worker))
        self._node, self._system = ray.get_runtime_context().get_node_id(), Sampler(gpus)
        threading.Thread(target=self._write_all, name="heartbeat", daemon=True).start()

    @contextmanager
    def during(self, phase: str, limit_s: float | None) -> Iterator[None]:
        """Report the block as `phase`. After `limit_s`, write all stacks to the log, even if Python hangs."""
        self._phase, self._since = phase, time.time()
        self._limit_s = limit_s or self._limit_s
        if limit_s is not None:
            faulthandler.dump_traceback_later(limit_s, file=sys.stderr)
        try:
            yield
        finally:
            self._phase, self._since = "idle", time.time()
            # Replaced and not cancelled where a background thread may keep the GIL from now on.
            if not self._watch_background():
                faulthandler.cancel_dump_traceback_later()

    def end_request(self) -> None:
        """Drop the launcher's request to free the working thread, which is free. Waits for a `beat` in progress."""
        with self._beating:
            kv_del(_free_key(self._worker))

    def _look_after(self, beat: Callable[[bool], None]) -> None:
        with self._beating:
            frees = kv_get(_free_key(self._worker)) is not None
            if frees:
                kv_del(_free_key(self._worker))
            try:
                beat(frees)
            except Exception:  # the next heartbeat may succeed
                log.warning("the process was not looked after", exc_info=True)

    def _watch_background(self) -> bool:
        """Write all stacks to the log if a background thread keeps the GIL for longer than the time limit. Return
        whether there is such a thread, and a limit."""
        if background_work() is None or self._limit_s is None:
            return False
        faulthandler.dump_traceback_later(self._limit_s, file=sys.stderr)
        return True

    def _write_all(self) -> None:
        while True:
            thread, phase, since = threading.main_thread().ident or 0, self._phase, self._since
            if (work := background_work()) is not None:
                thread = work.thread
                if phase == "idle" and work.phase:
                    phase, since = work.phase, work.since
                self._watch_background()
            counts, usage = latest_progress(), self._system.usage
            heartbeat = Heartbeat(self._worker, phase, since, time.time(), counts, _stack(thread), self._node, usage)
            try:
                kv_put(_key(self._worker), json.dumps(asdict(heartbeat)).encode(), overwrite=True)
                if self.beat is not None:
                    self._look_after(self.beat)
            except Exception as error:  # the next heartbeat may succeed
                log.debug("a heartbeat failed: %s", error)
            time.sleep(PERIOD_S)


def _stack(thread: int) -> tuple[str, ...]:
    """Return `Heartbeat.stack` of a thread. No frame is kept, because it would keep its variables, such as a model."""
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame)[-_FRAMES:] if frame else []
    return tuple(f"{one.filename}:{one.lineno} {one.name}" for one in frames)


def free(workers: Sequence[str]) -> None:
    """Let these workers' heartbeats free the threads that wait for other workers."""
    for worker in workers:
        kv_put(_free_key(worker), b"", overwrite=True)


def last_heartbeats(workers: Sequence[str]) -> list[Heartbeat]:
    """Return the last heartbeat of each worker that has written one."""
    found = []
    for worker in workers:
        if (value := kv_get(_key(worker))) is not None:
            content = json.loads(value)
            typed = {"stack": tuple(content["stack"]), "usage": Usage(**content["usage"])}
            found.append(Heartbeat(**content | typed))
    return found


def nodes_of(workers: Sequence[str]) -> list[str]:
    """Return the ids of the nodes of these workers."""
    return list(dict.fromkeys(one.node for one in last_heartbeats(workers)))


class SystemUsage:
    """Load of the workers' machines and GPUs, from heartbeats. Machine 0 is the first worker's."""

    def __init__(self, workers: Callable[[], Sequence[str]]):
        """`workers`: returns the names of the workers that live."""
        self._workers = workers
        self._seen: dict[str, Usage] = {}
        self._means: dict[str, dict[str, float]] = {}
        self._nodes: list[str] = []

    def take(self) -> dict[str, float]:
        """Return means since the last call, such as `node.0.cpu_util` or `node.0.gpu.3.mem_gb` (see
        `observability/system.py`); the previous means without a new sample."""
        values: dict[str, list[float]] = {}
        for one in last_heartbeats(self._workers()):
            if one.node not in self._nodes:
                self._nodes.append(one.node)
            means = one.usage.means_since(self._seen.get(one.worker, Usage()))
            if means:
                self._seen[one.worker], self._means[one.worker] = one.usage, means
            node = self._nodes.index(one.node)
            for name, value in self._means.get(one.worker, {}).items():
                values.setdefault(f"node.{node}.{name}", []).append(value)
        # Several workers may share a machine or a GPU.
        return {name: sum(seen) / len(seen) for name, seen in values.items()}


def hang(workers: Sequence[str], phase: str, cause: str, is_transient: bool = True) -> WorkerError:
    """Return the error for workers that are still in `phase`. It names the stragglers; its details have all stacks.
    `is_transient`: see `WorkerError`."""
    heartbeats, now = last_heartbeats(workers), time.time()
    named = stragglers(heartbeats, now) or list(workers)
    seen = "; ".join(one.describe(now) for one in heartbeats if one.worker in named)
    others = len(workers) - len(named)
    waiting = f"; {others} other{'s' if others > 1 else ''} wait{'' if others > 1 else 's'}" if others else ""
    details = "\n\n".join("\n  ".join([one.describe(now), *one.stack]) for one in heartbeats)
    cause = f"{cause}{waiting}; {seen}" if seen else cause
    return WorkerError(", ".join(named), phase, cause, details, is_transient=is_transient)


def stragglers(heartbeats: Sequence[Heartbeat], now: float) -> list[str]:
    """Return the workers that others probably wait for: silent ones, otherwise those with the least progress.

    Among equals, workers outside collectives are returned. On GPUs, ranks mostly wait outside collectives too, so all
    equals are returned.
    """
    silent = [one for one in heartbeats if one.is_silent(now)]
    # Engines report no progress.
    comparable = all(one.counts for one in heartbeats)
    least = min((one.progress for one in heartbeats), default=())
    behind = [one for one in heartbeats if one.progress == least] if comparable else list(heartbeats)
    busy = [one for one in behind if not one.waits_for_others]
    return [one.worker for one in silent or busy or behind]


def _key(worker: str) -> bytes:
    return f"nemo_rl_lite/{ray.get_runtime_context().get_job_id()}/{worker}".encode()


def _free_key(worker: str) -> bytes:
    return _key(worker) + b"/free"
