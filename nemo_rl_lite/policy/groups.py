"""Process groups of a rank: how it leaves them, and how it is freed from waiting for a lost rank.

NCCL kernels wait for a lost rank without an end. Another thread aborts all communicators. Then the kernels end, and so
do the calls that wait for them. Their results are wrong, and the launcher uses none of them. gloo needs no abort,
because its operations fail when a connection ends.

torch's watchdog would end a process 60 s after an error or a timeout of NCCL, and nothing can stop it then. So
`NCCL_ENVIRONMENT` leaves the watchdog only the detection, and `beat` ends the process. An abort stops it.
"""

import gc
import logging
import math
import os
import signal
import time
from collections.abc import Sequence
from threading import Thread
from typing import Any

import torch.distributed as dist

from nemo_rl_lite.compat.megatron import forget_groups
from nemo_rl_lite.compat.torch import nccl_backends, nccl_error
from nemo_rl_lite.refit import group as refit_group

log = logging.getLogger(__name__)

# Seconds from an error of NCCL to the end of the process.
END_S = 60.0
_failed_since = math.inf


def beat(frees: bool) -> None:
    """Look after this rank, with each heartbeat. `frees`: free the thread that works from waiting for other ranks."""
    if frees:
        begin_abort()
    _end_after(next((error for one in _backends() if (error := nccl_error(one))), ""), time.monotonic())


def _end_after(error: str, now: float) -> None:
    """End this process if NCCL has reported an error for END_S seconds."""
    global _failed_since
    _failed_since = min(_failed_since, now) if error else math.inf
    if now - _failed_since > END_S:
        log.error("NCCL reported %s %.0f s ago, and nothing has freed this rank: its process ends", error, END_S)
        os.kill(os.getpid(), signal.SIGKILL)


def begin_abort() -> list[Thread]:
    """Start to abort all NCCL communicators. May be repeated. Return the threads, which end with the aborts.

    The abort of one communicator may wait for the kernels of others, so all begin at once.
    """
    threads = [Thread(target=_abort, args=(one,), daemon=True, name="NCCL abort") for one in _backends()]
    for one in threads:
        one.start()
    if threads:
        log.info("aborting %d NCCL communicators, because a rank is lost", len(threads))
    return threads


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        log.warning("an NCCL communicator was not aborted: %s", error)


def _backends() -> list[Any]:
    return [*nccl_backends(), *refit_group.nccl_backends()]


def leave_groups(aborts: Sequence[Thread] = ()) -> None:
    """Leave all process groups, after dropping the model. Collective, except after `begin_abort`, whose threads are
    `aborts`. gloo's threads and sockets end with the last reference to a group."""
    from megatron.core import parallel_state

    # Free CUDA graphs, which use the groups.
    gc.collect()
    for one in aborts:
        one.join()
    parallel_state.destroy_model_parallel()
    forget_groups()
    dist.destroy_process_group()
