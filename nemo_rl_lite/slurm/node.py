"""Runs Ray on one node of a Slurm job: `srun --ntasks-per-node=1 python -m nemo_rl_lite.slurm.node`.

Task 0 starts Ray's head, writes `attach.sh`, waits until every node has joined, and runs a command or idles. The other
tasks join, and leave after the head. Ray gets only the job's CPUs, GPUs and memory, uses free ports, and requires the
token in `attach.sh`. A task leaves no process on its node.

`ray symmetric-run` is not used. It supports one job per node, with a fixed port. It stops all Rays of the node, ends on
SIGTERM at once, and has neither a token nor restarts.
"""

import argparse
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from nemo_rl_lite.errors import LauncherError, RunStopped
from nemo_rl_lite.system.machine import MIB, free_port
from nemo_rl_lite.system.stopping import SIGNALS

log = logging.getLogger(__name__)
ATTACH, STATUS = "attach.sh", "status"
# Restarts of a node's Ray while the head runs.
_RESTARTS = 3
# Share of the job's memory on a node for Ray's object store, Ray's default for a machine.
_OBJECT_STORE = 0.3
# Ray writes this file when all its processes are up.
_ADDRESS_FILE = "ray_current_cluster"
_POLL_S, _TRIES, _CONNECT_S, _STOP_S = 0.5, 3, 5.0, 20.0
# Lines of Ray's output in an error.
_SHOWN = 15


@dataclass(frozen=True)
class SlurmTask:
    """Task `rank` of `count`, one per node, with the job's CPUs, GPUs and bytes of memory there (None: Ray detects
    them). `address`: this node's address for other nodes."""

    rank: int
    count: int
    cpus: int
    gpus: int | None
    memory: int | None
    address: str | None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], interface: str | None = None) -> "SlurmTask":
        """Read srun's variables. `interface`: network interface of the address.

        Raises:
            LauncherError: not started by srun, several tasks per node, or an unknown interface.
        """
        missing = [name for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES") if name not in environ]
        if missing:
            raise LauncherError(f"{missing[0]} is not set: start this with srun --ntasks-per-node=1")
        tasks, nodes = int(environ["SLURM_NTASKS"]), int(environ["SLURM_NNODES"])
        if tasks != nodes:
            raise LauncherError(f"{tasks} tasks on {nodes} nodes; start one per node: srun --ntasks-per-node=1")
        cpus = len(os.sched_getaffinity(0))
        on_node = int(environ["SLURM_CPUS_ON_NODE"]) if "SLURM_CPUS_ON_NODE" in environ else cpus
        return cls(
            rank=int(environ["SLURM_PROCID"]),
            count=nodes,
            cpus=min(cpus, on_node),
            gpus=int(environ["SLURM_GPUS_ON_NODE"]) if "SLURM_GPUS_ON_NODE" in environ else None,
            memory=_memory(environ, on_node),
            address=_address_of(interface) if interface else _address_towards(environ),
        )

    def ray_options(self) -> list[str]:
        """Return the options of `ray start` that limit Ray to this job's share of the node."""
        options = [f"--num-cpus={self.cpus}"]
        if self.gpus is not None:
            options.append(f"--num-gpus={self.gpus}")
        if self.address is not None:
            options.append(f"--node-ip-address={self.address}")
        if self.memory is not None:
            shared = os.statvfs("/dev/shm")
            store = min(int(_OBJECT_STORE * self.memory), int(0.9 * shared.f_bavail * shared.f_frsize))
            options += [f"--memory={self.memory - store}", f"--object-store-memory={store}"]
        return options

    def environment(self) -> dict[str, str]:
        """Return variables for Ray and its processes. Otherwise gloo may choose a loopback interface."""
        names = [name for name, address in _addresses() if address == self.address]
        return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _memory(environ: Mapping[str, str], cpus: int) -> int | None:
    if int(environ.get("SLURM_MEM_PER_NODE") or 0):
        return int(environ["SLURM_MEM_PER_NODE"]) * MIB
    if int(environ.get("SLURM_MEM_PER_CPU") or 0):
        return int(environ["SLURM_MEM_PER_CPU"]) * cpus * MIB
    return None


def _addresses() -> list[tuple[str, str]]:
    """Return the interfaces and their IPv4 addresses."""
    found = psutil.net_if_addrs().items()
    return [(name, one.address) for name, all_of_it in found for one in all_of_it if one.family == socket.AF_INET]


def _address_of(interface: str) -> str:
    addresses = dict(reversed(_addresses()))
    if interface not in addresses:
        names = ", ".join(sorted(addresses))
        raise LauncherError(
            f"{socket.gethostname()} has no interface '{interface}' with an IPv4 address; it has {names}"
        )
    return addresses[interface]


def _address_towards(environ: Mapping[str, str]) -> str | None:
    """Return the address from which this node reaches srun's node; None if unknown or the same node."""
    target = environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if not target:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing.
        probe.connect((target, 9))
        own = probe.getsockname()[0]
    return None if own.startswith("127.") else own


class RayProcess:
    """Ray's processes of one node, in their own folder. Their output is in `log_file`."""

    def __init__(self, task: SlurmTask, options: list[str], logs: Path):
        """`options`: those of `ray start` in addition to the node's resources."""
        self.log_file = logs / f"ray-node-{task.rank}.log"
        self._task, self._options = task, options

    def __enter__(self) -> "RayProcess":
        # TMPDIR may be too long for a socket's path, of at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="nrl-ray-", dir="/tmp"))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [*self._options, *self._task.ray_options(), f"--temp-dir={self._folder}"]
        command.append(f"--dashboard-agent-listen-port={free_port()}")
        with self.log_file.open("a") as output:
            # A new session, so that signals to this process group do not reach Ray.
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
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid)
            family = [started, *started.children(recursive=True)]
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
        """Wait for Ray, and return the cluster's host:port.

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
    """Return whether a process listens at host:port."""
    host, _, port = address.rpartition(":")
    for _ in range(_TRIES):
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
            return True
        except OSError:
            time.sleep(_POLL_S)
    return False


class _AskedToEnd(BaseException):
    """Raised by a signal while the nodes are joining."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the node's part. Exit status: the command's; 1 if Ray did not start or a node did not join."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s")
    try:
        task = SlurmTask.from_environment(os.environ, given.interface)
        given.meeting.mkdir(parents=True, exist_ok=True)
        given.logs.mkdir(parents=True, exist_ok=True)
        status = _head(task, given) if task.rank == 0 else _member(task, given)
    except LauncherError as error:
        sys.stderr.write(f"node: {error}\n")
        status = error.exit_status
    except _AskedToEnd:
        sys.stderr.write("node: asked to end before every node had joined\n")
        status = RunStopped.exit_status
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nemo_rl_lite.slurm.node", description=__doc__)
    where = f"a folder that all nodes see, for {ATTACH} and the command's exit status"
    parser.add_argument("--meeting", type=Path, required=True, help=where)
    parser.add_argument("--logs", type=Path, required=True, help="a folder for Ray's output, a file for each node")
    parser.add_argument("--interface", help="network interface of every node (default: the one towards srun)")
    parser.add_argument("--join-timeout-s", type=float, default=600.0, help="until every node must have joined")
    parser.add_argument("--dashboard", action="store_true", help="with Ray's dashboard, which `ray job submit` needs")
    parser.add_argument("command", nargs="*", help="what to run on the first node (after --); nothing: idle")
    return parser


def _head(task: SlurmTask, given: argparse.Namespace) -> int:
    started, command = time.monotonic(), _Command()
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Ray reads these variables when it is imported.
    os.environ.update(access)
    options = ["--head", f"--port={free_port()}", f"--ray-client-server-port={free_port()}"]
    options.append(f"--include-dashboard={str(given.dashboard).lower()}")
    dashboard = free_port() if given.dashboard else None
    if dashboard is not None:
        options += ["--dashboard-host=0.0.0.0", f"--dashboard-port={dashboard}"]
    attach = given.meeting / ATTACH
    with RayProcess(task, options, given.logs) as process:
        address = process.address(given.join_timeout_s)
        access["RAY_ADDRESS"] = address
        if dashboard is not None:
            access["RAY_API_SERVER_ADDRESS"] = f"http://{address.rpartition(':')[0]}:{dashboard}"
        # Atomic, and readable by this user only.
        part = attach.with_name(f".{attach.name}")
        with os.fdopen(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as stream:
            stream.write("".join(f"export {name}={shlex.quote(value)}\n" for name, value in access.items()))
        part.rename(attach)
        try:
            left_s = given.join_timeout_s - (time.monotonic() - started)
            wait_for_nodes(address, task.count, left_s, given.logs)
            log.info("Ray is up on %d nodes at %s; to attach, on one of them: source %s", task.count, address, attach)
            status = command.run(given.command, task.environment() | access) if given.command else command.idle()
        finally:
            attach.unlink()
    # srun's exit status is the highest of all tasks, so the command's is written down.
    (given.meeting / STATUS).write_text(f"{status}\n")
    return status


def wait_for_nodes(address: str, count: int, limit_s: float, logs: Path) -> None:
    """Wait until `count` nodes have joined the Ray at `address`.

    Raises:
        LauncherError: some did not join within `limit_s` seconds; the message names those that did.
    """
    import ray

    quiet = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
    ray.init(address=address, **quiet)
    try:
        deadline = time.monotonic() + limit_s
        while len(there := [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]) < count:
            if time.monotonic() > deadline:
                joined = f"{len(there)} of {count} nodes joined Ray within {limit_s:.0f} s: {', '.join(sorted(there))}"
                raise LauncherError(f"{joined}. For the others, see {logs}/ray-node-*.log")
            time.sleep(_POLL_S)
    finally:
        ray.shutdown()


def _member(task: SlurmTask, given: argparse.Namespace) -> int:

    def stay(number: int, frame: FrameType | None) -> None:
        log.info("%s: this node stays until the first node is done", signal.Signals(number).name)

    for number in SIGNALS:
        # The run needs this node to save its checkpoint; the first node decides when all end.
        signal.signal(number, stay)
    attach, deadline = given.meeting / ATTACH, time.monotonic() + given.join_timeout_s
    while not (access := _read(attach)):
        if time.monotonic() > deadline:
            late = f"the first node did not write its Ray's address within {given.join_timeout_s:g} s"
            raise LauncherError(f"node {task.rank}: {late}. Do all nodes see {given.meeting}?")
        time.sleep(_POLL_S)
    os.environ.update(access)
    address = access["RAY_ADDRESS"]
    for _ in range(1 + _RESTARTS):
        with RayProcess(task, [f"--address={address}"], given.logs) as process:
            while process.runs() and answers(address):
                time.sleep(_POLL_S)
        if not answers(address):
            return 0
        log.warning("node %d: its Ray ended, see %s", task.rank, process.log_file)
    raise LauncherError(f"node {task.rank}: its Ray ended {1 + _RESTARTS} times, see {process.log_file}")


class _Command:
    """The command on the first node, which receives this process's signals."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._listen()

    def _listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            raise _AskedToEnd
        self._process.send_signal(number)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the command and return its exit status as a shell does."""
        # ray.init has installed its own handler.
        self._listen()
        # A new session, so that a signal to this process group reaches the command once.
        self._process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def idle(self) -> int:
        """Sleep until a signal comes."""
        self._listen()
        try:
            while True:
                time.sleep(3600)
        except _AskedToEnd:
            return 0


def _read(attach: Path) -> dict[str, str]:
    """Return the variables of attach.sh; empty until the file exists."""
    try:
        words = shlex.split(attach.read_text())
    except FileNotFoundError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


if __name__ == "__main__":
    main()
