"""Starts Ray with the run and stops it, however the run ends."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from nemo_rl_lite.compat.ray import (
    end_broken_node,
    end_processes_behind,
    leave_the_launchers_session,
    start_no_api_server,
    was_slow,
)
from nemo_rl_lite.errors import ConfigError, LauncherError, Violation
from nemo_rl_lite.host.machine import OWN_RAY, RAY_ADDRESS, RAY_ADDRESS_FIX, ray_address
from nemo_rl_lite.host.stopping import SIGNALS, interrupt

# The environment of Ray's own processes: no usage report, no idle worker for each core.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",
}

log = logging.getLogger(__name__)


@contextmanager
def ray_runtime() -> Iterator[None]:
    """Run Ray on this machine (or join the cluster that RAY_ADDRESS names) for the time of the block.

    SIGTERM and SIGUSR1 end the block like Ctrl-C does, so that no worker outlives the run.
    """
    previous = {number: signal.signal(number, interrupt) for number in SIGNALS}
    os.environ.update(ENVIRONMENT)
    leave_the_launchers_session()
    start_no_api_server()
    try:
        _start_or_join()
        # ray.init has installed its own handler, which would end the process at once.
        signal.signal(signal.SIGTERM, interrupt)
        yield
    finally:
        # A second Ctrl-C must not interrupt the shutdown.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (*SIGNALS, signal.SIGINT)}
        end_broken_node()
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
            if not was_slow(error):
                raise
            end_processes_behind(error)
            if is_second:
                raise LauncherError(
                    "Ray did not start within its time limit, twice: the machine is overloaded. Try again when less "
                    f"else runs there, or start Ray before the run (ray start --head) and set {RAY_ADDRESS}=auto"
                ) from error
        log.warning("Ray did not start within its time limit; it is started once more")
        ray.shutdown()


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


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
