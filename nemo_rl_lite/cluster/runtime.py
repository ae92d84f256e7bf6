"""Starts Ray with the run and stops it, however the run ends."""

import logging
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from nemo_rl_lite.errors import ConfigError, LauncherError, Violation
from nemo_rl_lite.host.machine import OWN_RAY, RAY_ADDRESS, RAY_ADDRESS_FIX, ray_address
from nemo_rl_lite.host.stopping import SIGNALS, interrupt

# The environment of Ray's own processes: no usage report, no idle worker for each core.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",
}

_NEEDED = ("gcs_server", "raylet")
# Ray raises a bare Exception with this where its own processes take longer than its limits.
_TIMED_OUT = "timed out during startup"

log = logging.getLogger(__name__)


@contextmanager
def ray_runtime() -> Iterator[None]:
    """Run Ray on this machine (or join the cluster that RAY_ADDRESS names) for the time of the block.

    SIGTERM and SIGUSR1 end the block like Ctrl-C does, so that no worker outlives the run.
    """
    previous = {number: signal.signal(number, interrupt) for number in SIGNALS}
    os.environ.update(ENVIRONMENT)
    _leave_the_launchers_session()
    _start_no_api_server()
    try:
        _start_or_join()
        # ray.init has installed its own handler, which would end the process at once.
        signal.signal(signal.SIGTERM, interrupt)
        yield
    finally:
        # A second Ctrl-C must not interrupt the shutdown.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (*SIGNALS, signal.SIGINT)}
        node = ray._private.worker._global_node
        if node is not None and lost_process():
            # Those that are left wait for it, for a minute.
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        ray.shutdown()
        for number, handler in (handlers | previous).items():
            signal.signal(number, handler)


def _start_or_join() -> None:
    """Start once more where Ray is too slow to start; raise LauncherError where it is again, and ConfigError where the
    cluster of RAY_ADDRESS cannot be joined."""
    for is_second in (False, True):
        try:
            _init()
            return
        except Exception as error:
            if _TIMED_OUT not in str(error):
                raise
            _end_processes_behind(error)
            if is_second:
                raise LauncherError(
                    "Ray did not start within its time limit, twice: the machine is overloaded. Try again when less "
                    f"else runs there, or start Ray before the run (ray start --head) and set {RAY_ADDRESS}=auto"
                ) from error
        log.warning("Ray did not start within its time limit; it is started once more")
        ray.shutdown()


def _end_processes_behind(error: Exception) -> None:
    """End the processes of a node that did not start: Ray keeps no reference to it, and they would run as long as the
    launcher."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, ray._private.node.Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


def _init() -> None:
    address = ray_address() or "local"
    try:
        ray.init(
            # Without this, Ray joins the cluster that was last started on this machine.
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address in OWN_RAY:
            raise
        cause = " ".join(str(error).split())
        raise ConfigError([Violation(RAY_ADDRESS, address, f"cannot be joined: {cause}", RAY_ADDRESS_FIX)]) from error


def lost_process() -> str:
    """A process that has ended of the Ray that this process has started, without which nothing works; empty while all
    are there."""
    node = ray._private.worker._global_node
    processes = node.all_processes.items() if node is not None else ()
    ended = (kind for kind, infos in processes if any(info.process.poll() is not None for info in infos))
    return next((f"Ray's {kind}" for kind in ended if kind in _NEEDED), "")


def _leave_the_launchers_session() -> None:
    """Let each process that Ray starts from here lead a session of its own. A signal to the launcher's process group
    (from `timeout`, Slurm, systemd, a container that closes) would otherwise end Ray before the run has saved."""
    utils = ray._private.utils
    if getattr(utils.set_kill_on_parent_death_linux, "leaves_session", False):
        return
    end_with_parent = utils.set_kill_on_parent_death_linux

    def in_child() -> None:
        os.setsid()
        end_with_parent()

    in_child.leaves_session = True  # pyrefly: ignore
    # Ray calls this between fork and exec, and has no option for it.
    utils.set_kill_on_parent_death_linux = in_child


def _start_no_api_server() -> None:
    """Let `ray.init` start no API server. It serves the dashboard and usage reports, which are off here; `ray.init`
    waits until it runs, and has no option that leaves it out."""

    def start_none(node: Any, **_: Any) -> None:
        node._webui_url = ""

    ray._private.node.Node.start_api_server = start_none  # pyrefly: ignore


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
