"""Runs one node's part of a Ray over the nodes of a Slurm job: `srun --ntasks-per-node=1 python -m ...slurm.node`.

Task 0 starts Ray's head, writes down how to attach to it, waits until every node has joined, and runs a command there,
or idles. The other tasks join, and leave when the head has ended. Ray gets this job's CPUs, GPUs and memory alone, uses
free ports, and serves only processes that know the secret in `attach.sh`. A task leaves no process on its node.
"""

import argparse
import logging
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from nemo_rl_lite.errors import LauncherError, RunStopped
from nemo_rl_lite.host.machine import free_port
from nemo_rl_lite.slurm.ray_process import RayProcess, answers
from nemo_rl_lite.slurm.task import SlurmTask

log = logging.getLogger(__name__)

ATTACH, STATUS = "attach.sh", "status"
# The signals that Slurm sends before it ends a task, and that the batch script forwards.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_POLL_S = 0.5
# The number of times that a node's Ray is restarted while the head runs.
_RESTARTS = 3


class _AskedToEnd(BaseException):
    """A signal came while the nodes were joining."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exit status: the command's; 1 where Ray did not start or a node did not join."""
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
        _write_secretly(attach, "".join(f"export {name}={shlex.quote(value)}\n" for name, value in access.items()))
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
        LauncherError: they did not within `limit_s` seconds; the message names those that did.
    """
    import ray

    quiet = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
    ray.init(address=address, **quiet)
    try:
        deadline = time.monotonic() + limit_s
        while len(there := [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]) < count:
            if time.monotonic() > deadline:
                joined = f"{len(there)} of {count} nodes joined Ray within {limit_s:.0f} s: {', '.join(sorted(there))}"
                raise LauncherError(f"{joined}. What kept the others is in {logs}/ray-node-*.log")
            time.sleep(_POLL_S)
    finally:
        ray.shutdown()


def _member(task: SlurmTask, given: argparse.Namespace) -> int:
    for number in _SIGNALS:
        # The first node decides when all end; until then the run needs this node to save.
        signal.signal(number, _stay)
    attach, deadline = given.meeting / ATTACH, time.monotonic() + given.join_timeout_s
    while not (access := _read(attach)):
        if time.monotonic() > deadline:
            late = f"the first node did not say within {given.join_timeout_s:g} s where its Ray is"
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


def _stay(number: int, frame: FrameType | None) -> None:
    log.info("%s: this node stays until the first node is done", signal.Signals(number).name)


class _Command:
    """The command on the first node. It gets the signals that this process receives."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._listen()

    def _listen(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            raise _AskedToEnd
        self._process.send_signal(number)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the command and return its exit status as a shell does."""
        # ray.init has installed its own handler.
        self._listen()
        # A new session, so that a signal to this process' group reaches the command once.
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


def _write_secretly(file: Path, text: str) -> None:
    """Write the file atomically, readable by this user alone."""
    part = file.with_name(f".{file.name}")
    with os.fdopen(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as stream:
        stream.write(text)
    part.rename(file)


def _read(attach: Path) -> dict[str, str]:
    """The variables that attach.sh exports; empty while the file does not exist."""
    try:
        words = shlex.split(attach.read_text())
    except FileNotFoundError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


if __name__ == "__main__":
    main()
