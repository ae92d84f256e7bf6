"""Starts Ray with the run and stops it, however the run ends."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray

from nemo_rl_lite.host.stopping import SIGNALS, note_signal

# The environment of every process that Ray starts: no usage report, no idle worker for each core, no hub, no tokenizer
# threads.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@contextmanager
def ray_runtime() -> Iterator[None]:
    """Run Ray on this machine (or join the cluster that RAY_ADDRESS names) for the time of the block.

    SIGTERM and SIGUSR1 end the block like Ctrl-C does, so that no worker outlives the run.
    """
    previous = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name.startswith("RAY_")})
    try:
        ray.init(
            # Without this, Ray joins the cluster that was last started on this machine.
            address=os.environ.get("RAY_ADDRESS", "local"),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            runtime_env={"env_vars": ENVIRONMENT},
        )
        # ray.init has installed its own handler, which would end the process at once.
        signal.signal(signal.SIGTERM, _interrupt)
        yield
    finally:
        # A second Ctrl-C must not interrupt the shutdown.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (*SIGNALS, signal.SIGINT)}
        ray.shutdown()
        for number, handler in (handlers | previous).items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    note_signal(number)
    raise KeyboardInterrupt


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
