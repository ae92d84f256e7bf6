"""Runs `ray start` on this node for the time of a block. Imports nothing heavy."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.host.machine import free_port
from nemo_rl_lite.slurm.task import SlurmTask

# Ray writes this file when all its processes run.
_ADDRESS_FILE = "ray_current_cluster"
_POLL_S, _TRIES, _CONNECT_S, _STOP_S = 0.2, 3, 5.0, 20.0
# The number of lines of Ray's output that an error shows.
_SHOWN = 15


class RayProcess:
    """Ray's processes of one node. Their output is in `log_file`; no other job uses their folder."""

    def __init__(self, task: SlurmTask, options: list[str], logs: Path):
        """`options`: those of `ray start` in addition to the node's resources."""
        self.log_file = logs / f"ray-node-{task.rank}.log"
        self._task, self._options = task, options

    def __enter__(self) -> "RayProcess":
        # TMPDIR may be too long: the path of a socket has at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="nrl-ray-", dir="/tmp"))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [*self._options, *self._task.ray_options(), f"--temp-dir={self._folder}"]
        command.append(f"--dashboard-agent-listen-port={free_port()}")
        with self.log_file.open("a") as output:
            # A new session, so that signals to this process' group do not reach Ray.
            self._process = subprocess.Popen(
                command,
                env=os.environ | self._task.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        family = _family(self._process.pid)
        self._process.terminate()
        # `ray start` ends its children itself.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_STOP_S)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def runs(self) -> bool:
        return self._process.poll() is None

    def address(self, limit_s: float) -> str:
        """host:port of the cluster, once Ray is up here.

        Raises:
            LauncherError: Ray did not start within `limit_s` seconds; the message has the end of its output.
        """
        deadline = time.monotonic() + limit_s
        while not (self._folder / _ADDRESS_FILE).exists():
            if not self.runs() or time.monotonic() > deadline:
                why = "is not up yet" if self.runs() else f"ended with status {self._process.returncode}"
                last = "\n".join(self.log_file.read_text(errors="replace").splitlines()[-_SHOWN:])
                raise LauncherError(f"Ray {why} on {socket.gethostname()}, see {self.log_file}:\n{last}")
            time.sleep(_POLL_S)
        return (self._folder / _ADDRESS_FILE).read_text().strip()


def answers(address: str) -> bool:
    """Whether a process listens at host:port."""
    host, _, port = address.rpartition(":")
    for _ in range(_TRIES):
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
            return True
        except OSError:
            time.sleep(_POLL_S)
    return False


def _family(pid: int) -> list[psutil.Process]:
    """A process and its descendants."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
