"""What each worker is doing, told by a thread of its own, so that a worker that hangs can be found and looked into."""

import faulthandler
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from nemo_rl_lite.observability import progress
from nemo_rl_lite.observability.system import Sampler, Usage

log = logging.getLogger(__name__)

BEAT_S = 2.0
# Without a beat for so long, a process is held up as a whole.
SILENT_S = 5 * BEAT_S
_FRAMES = 24


@dataclass(frozen=True)
class Beat:
    """One sign of life. Times are seconds since the epoch."""

    worker: str
    phase: str
    since: float
    at: float
    counts: dict[str, int] = field(default_factory=dict)
    stack: tuple[str, ...] = ()
    """`file:line function` of the thread that works, the innermost frame last."""
    node: str = ""
    usage: Usage = field(default_factory=Usage)
    """Of its machine and its GPUs."""

    @property
    def waits_for_others(self) -> bool:
        """Whether it is in a collective operation, and so waits for ranks that are not there yet."""
        return any("torch/distributed/" in frame for frame in self.stack[-4:])

    @property
    def done(self) -> tuple[int, ...]:
        """How far it is."""
        return tuple(self.counts.get(name, 0) for name in ("optimizer_step", "micro_batch"))

    def is_silent(self, now: float) -> bool:
        """Whether the process as a whole is held up, its other threads too."""
        return now - self.at > SILENT_S

    def describe(self, now: float) -> str:
        counts = "".join(f", {name.replace('_', ' ')} {count}" for name, count in self.counts.items())
        silent = f", no sign of life for {now - self.at:.0f} s" if self.is_silent(now) else ""
        where = f", at {self.stack[-1]}" if self.stack else ""
        return f"{self.worker}: {self.phase} for {now - self.since:.0f} s{counts}{silent}{where}"


class Heartbeat:
    """Of this process, whose main thread works."""

    def __init__(self, worker: str, gpus: Sequence[str] = ()):
        self._worker, self._phase, self._since = worker, "idle", time.time()
        self._node, self._system = ray.get_runtime_context().get_node_id(), Sampler(gpus)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @contextmanager
    def during(self, phase: str, limit_s: float | None) -> Iterator[None]:
        """Where the phase takes longer than its limit, all threads' stacks go to the log, even if Python hangs."""
        self._phase, self._since = phase, time.time()
        if limit_s is not None:
            faulthandler.dump_traceback_later(limit_s, file=sys.stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._phase, self._since = "idle", time.time()

    def _beat(self) -> None:
        while True:
            beat = Beat(
                self._worker,
                self._phase,
                self._since,
                time.time(),
                progress.latest(),
                _main_stack(),
                self._node,
                self._system.usage,
            )
            try:
                _internal_kv_put(_key(self._worker), json.dumps(asdict(beat)).encode(), overwrite=True)
            except Exception as error:  # whatever it is: the next beat may get through
                log.debug("a heartbeat did not get through: %s", error)
            time.sleep(BEAT_S)


def last_beats(workers: Sequence[str]) -> list[Beat]:
    """The last of each worker that has given any."""
    beats = []
    for worker in workers:
        value = _internal_kv_get(_key(worker))
        if value is not None:
            content = json.loads(value)
            whole = {"stack": tuple(content["stack"]), "usage": Usage(**content["usage"])}
            beats.append(Beat(**content | whole))
    return beats


def _main_stack() -> tuple[str, ...]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)[-_FRAMES:] if frame else []
    return tuple(f"{one.filename}:{one.lineno} {one.name}" for one in frames)


def _key(worker: str) -> bytes:
    return f"nemo_rl_lite/{ray.get_runtime_context().get_job_id()}/{worker}".encode()
