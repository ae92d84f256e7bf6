"""The launcher's end of one of the processes that `call_process.py` runs in."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import psutil

from nemo_rl_lite.host.call import Call, Target

# A process may take this long, in seconds, to start and to import the user's code.
START_S = 60.0


@dataclass(eq=False)
class CalledProcess:
    """A process, this end of its pipe, a descriptor that is readable once it has ended, and what it does. The process
    ends when this end of the pipe is closed, even by a crash."""

    process: subprocess.Popen
    pipe: Connection
    ended: int
    started: float
    is_ready: bool = False
    is_retired: bool = False
    """One of its calls was late and may still run there. It takes nothing new, and ends when the others are done."""
    calls: dict[int, tuple[Call, float]] = field(default_factory=dict)
    """By number: the call, and when it is late."""
    sessions: set[int] = field(default_factory=set)

    @classmethod
    def start(cls, target: Target, at_once: int) -> "CalledProcess":
        """Start a process that holds the target and takes `at_once` calls at a time. Raises OSError."""
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "nemo_rl_lite.host.call_process", str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        with suppress(OSError):
            # The user's code may be in a folder that only this process has on its path.
            ours.send((sys.path, target.path, dict(target.arguments), at_once))
        return cls(process, ours, os.pidfd_open(process.pid), time.monotonic())

    @property
    def late_at(self) -> list[float]:
        """When its calls are late, and its start."""
        return [late for _, late in self.calls.values()] + ([] if self.is_ready else [self.started + START_S])

    def settle(self, number: int | None, value: Any) -> None:
        """Give a call its result; does nothing where it was given up, or is none."""
        call, _ = self.calls.pop(number, (None, 0.0)) if number is not None else (None, 0.0)
        if call is not None:
            call.settle(value)

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
