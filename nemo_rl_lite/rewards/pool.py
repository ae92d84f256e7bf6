"""Processes judge samples, each sample within a time limit that holds whatever the reward does.

A reward may hang inside one long step of C code (a huge power, a regular expression), where neither a signal handler
nor another Python thread can run. So each process has a watchdog that ends it from outside the interpreter, and the
pool starts a replacement.
"""

import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from nemo_rl_lite.config.schema import RewardConfig
from nemo_rl_lite.data.problems import Problem

# A process may take this long, in seconds, to start and to import the reward.
START_S = 60.0
# Exit statuses of a process that was killed by its own watchdog (faulthandler) or by the pool.
_LATE = (1, -signal.SIGKILL)


class RewardError(Exception):
    """A reward could not be computed; the message says why."""


Verdict = float | RewardError


@dataclass
class _Worker:
    """A judging process, the pool's end of its pipe, and its current sample. The process ends when the pool's end is
    closed, even by a crash.
    """

    process: subprocess.Popen
    pipe: Connection
    sample: int = 0
    since: float = 0.0


class JudgePool:
    """`reward.processes` processes share a rollout's samples. They start at once and live as long as the run."""

    def __init__(self, config: RewardConfig, timeout_s: float):
        self._config, self._timeout_s = config, timeout_s
        self._workers = [self._start() for _ in range(config.processes)]
        # This also kills workers when the launcher ends during a long reward.
        weakref.finalize(self, _end, self._workers)

    def __call__(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Return a verdict for each response, in order; a `RewardError` where it took too long."""
        verdicts: dict[int, Verdict] = {}
        samples = iter(enumerate(zip(responses, problems, strict=True)))
        busy: dict[Connection, _Worker] = {}

        def give(worker: _Worker) -> None:
            for sample, pair in samples:
                worker.sample, worker.since = sample, time.monotonic()
                busy[worker.pipe] = worker
                self._send(worker, pair)
                return

        for worker in self._workers:
            give(worker)
        while busy:
            ready = wait(list(busy), timeout=self._timeout_s + START_S)
            if not ready:
                # A late worker ends itself, unless the import of its reward hangs.
                for worker in busy.values():
                    worker.process.kill()
                continue
            for worker in [worker for pipe, worker in busy.items() if pipe in ready]:
                del busy[worker.pipe]
                verdicts[worker.sample], worker = self._verdict(worker)
                give(worker)
        return [verdicts[sample] for sample in range(len(responses))]

    def _verdict(self, worker: _Worker) -> tuple[Verdict, _Worker]:
        """Return the worker's verdict, and the worker to use next: the same one or its replacement."""
        try:
            verdict = worker.pipe.recv()
            return (RewardError(verdict) if isinstance(verdict, str) else verdict), worker
        except (EOFError, OSError):
            status = worker.process.wait()
            # A sample's clock starts while its worker may still be starting, so the time alone does not show lateness.
            late = status in _LATE and time.monotonic() - worker.since >= self._timeout_s
            cause = (
                f"no verdict within reward.timeout_s = {self._timeout_s:g}"
                if late
                else f"the judging process ended with status {status}"
            )
            return RewardError(cause), self._replace(worker)

    def _send(self, worker: _Worker, message: object) -> None:
        with suppress(OSError):  # The worker is dead; waiting for its verdict will report that.
            worker.pipe.send(message)

    def _replace(self, worker: _Worker) -> _Worker:
        worker.pipe.close()
        place = self._workers.index(worker)
        self._workers[place] = self._start()
        return self._workers[place]

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "nemo_rl_lite.rewards.worker", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        worker = _Worker(process, ours)
        # The user's reward may be in a folder that only this process has on its path.
        self._send(worker, (sys.path, self._config.name, self._config.kwargs, self._timeout_s))
        return worker


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
