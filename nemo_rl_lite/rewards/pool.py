"""Processes judge samples, each sample within a time limit that holds whatever the reward does.

A reward may hang inside one long step of C code (a huge power, a regular expression), or leave processes behind. So a
judging process leads a session of its own, adopts what its children leave, and is ended from here with all of them.
"""

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import psutil

from nemo_rl_lite.config.schema import RewardConfig
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.observability import limits
from nemo_rl_lite.rewards.registry import RewardError

# A process may take this long, in seconds, to start and to import the reward.
START_S = 60.0
# So many starts in a row may fail: one may have met a moment without memory.
_MOST_STARTS = 3

Verdict = float | RewardError
_Sample = tuple[int, tuple[str, Problem]]


@dataclass
class _Worker:
    """A judging process, the pool's end of its pipe, a descriptor that is readable once it has ended, and the sample
    that it judges. The process ends when the pool's end is closed, even by a crash.
    """

    process: subprocess.Popen
    pipe: Connection
    ended: int
    deadline: float
    is_ready: bool = False
    sample: _Sample | None = field(default=None, repr=False)

    def end(self) -> None:
        """Kill the process and everything that it has started."""
        with suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            own.suspend()
            for one in [*own.children(recursive=True), own]:
                with suppress(psutil.Error):
                    one.kill()
        # What a process that ended by itself has left is still in its group.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()
        os.close(self.ended)


class JudgePool:
    """At most `reward.processes` processes share a rollout's samples. One starts at once, the others when there are as
    many samples; they live as long as the run."""

    def __init__(self, config: RewardConfig, timeout_s: float):
        self._config, self._timeout_s, self._failed_starts = config, timeout_s, 0
        self._workers = [self._start()]
        weakref.finalize(self, _end, self._workers)

    def __call__(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Return a verdict for each response, in order; a `RewardError` where it took too long."""
        missing = min(self._config.processes, len(responses)) - len(self._workers)
        self._workers += [self._start() for _ in range(missing)]
        verdicts: dict[int, Verdict] = {}
        samples = enumerate(zip(responses, problems, strict=True))
        while True:
            for worker in self._workers:
                if worker.is_ready and worker.sample is None:
                    self._give(worker, next(samples, None))
            if len(verdicts) == len(responses):
                return [verdicts[sample] for sample in range(len(responses))]
            # A worker that is ready, and for which no sample is left, is not waited for.
            busy = [worker for worker in self._workers if worker.sample is not None or not worker.is_ready]
            first = min(worker.deadline for worker in busy)
            wait([*(one.pipe for one in busy), *(one.ended for one in busy)], max(first - time.monotonic(), 0))
            for worker in busy:
                self._look_at(worker, verdicts)
            limits.progressed()

    def _give(self, worker: _Worker, sample: _Sample | None) -> None:
        if sample is not None:
            worker.sample, worker.deadline = sample, time.monotonic() + self._timeout_s
            with suppress(OSError):  # The worker is dead; that will be seen.
                worker.pipe.send(sample[1])

    def _look_at(self, worker: _Worker, verdicts: dict[int, Verdict]) -> None:
        """Take the worker's verdict, if it has one; replace it where it has ended or is late.

        Raises:
            DataError: processes do not start.
        """
        with suppress(EOFError, OSError):
            while worker.pipe.poll():
                said = worker.pipe.recv()
                if worker.sample is not None:
                    verdicts[worker.sample[0]], worker.sample = said, None
                worker.is_ready, self._failed_starts = True, 0
        status = worker.process.poll()
        late = worker.deadline <= time.monotonic() and (worker.sample is not None or not worker.is_ready)
        if status is None and not late:
            return
        if worker.sample is not None:
            late_text = f"no verdict within reward.timeout_s = {self._timeout_s:g}"
            ended_text = f"the judging process ended with status {status}"
            verdicts[worker.sample[0]] = RewardError(late_text if status is None else ended_text)
        elif not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts == _MOST_STARTS:
                why = f"ended with status {status}" if status is not None else f"took longer than {START_S:g} s"
                raise DataError(f"reward.name = {self._config.name}: the start of its judging process {why}")
        worker.end()
        self._workers[self._workers.index(worker)] = self._start()

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "nemo_rl_lite.rewards.worker", str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        worker = _Worker(process, ours, os.pidfd_open(process.pid), time.monotonic() + START_S)
        with suppress(OSError):
            # The user's reward may be in a folder that only this process has on its path.
            worker.pipe.send((sys.path, self._config.name, self._config.kwargs))
        return worker


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.end()
