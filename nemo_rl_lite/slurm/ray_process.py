"""`ray start` on this node, up for the time of a block and gone after it. Imports nothing heavy."""

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
from nemo_rl_lite.host.ports import free_port
from nemo_rl_lite.slurm.seat import Seat

# Ray writes it when everything runs.
_ADDRESS_FILE = "ray_current_cluster"
_POLL_S, _TRIES, _CONNECT_S, _STOP_S = 0.2, 3, 5.0, 20.0
# Lines of Ray's output that an error shows.
_SHOWN = 15


class RayProcess:
    """Ray's processes of one node. Their output is in `log_file`; their folder is this job's own."""

    def __init__(self, seat: Seat, options: list[str], logs: Path):
        """`options` of `ray start`, beside those that name the node's resources."""
        self.log_file = logs / f"ray-node-{seat.rank}.log"
        self._seat, self._options = seat, options

    def __enter__(self) -> "RayProcess":
        # Not in TMPDIR: the path of a socket may have 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="nrl-ray-", dir="/tmp"))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [*self._options, *self._seat.ray_options(), f"--temp-dir={self._folder}"]
        command.append(f"--dashboard-agent-listen-port={free_port()}")
        with self.log_file.open("a") as output:
            # In a session of its own: what is sent to this process' group is not meant for Ray.
            self._process = subprocess.Popen(
                command,
                env=os.environ | self._seat.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        everyone = _family(self._process.pid)
        self._process.terminate()
        # Of itself it ends its children.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_STOP_S)
        for process in everyone:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def runs(self) -> bool:
        return self._process.poll() is None

    def address(self, limit_s: float) -> str:
        """host:port of the cluster, once Ray is up here.

        Raises:
            LauncherError: it did not start, or not within `limit_s` seconds; with the end of its output.
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
    """Whether somebody listens at host:port."""
    host, _, port = address.rpartition(":")
    for _ in range(_TRIES):
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
            return True
        except OSError:
            time.sleep(_POLL_S)
    return False


def _family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
