"""Workers for tests of what the launcher makes of them."""

import sys
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from nemo_rl_lite.observability.liveness import note_progress


class Quiet:
    """Does nothing, and says so."""

    def answer(self) -> str:
        return "here"


class Slow:
    """Says that it starts, and does not come to an end with it."""

    def __init__(self) -> None:
        sys.stdout.write("slow\n")
        compute_for_ever(600)


class Rank:
    """One of several that meet in a collective."""

    def __init__(self, rank: int, size: int, port: int, timeout_s: float):
        self._rank = rank
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        # From here on: ranks have come one after the other.
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)

    def meet(self, late: int, seconds: float) -> None:
        """All but `late` wait for it."""
        note_progress(optimizer_step=3, micro_batch=2)
        if self._rank == late:
            compute_for_ever(seconds)
        dist.barrier()


def compute_for_ever(seconds: float) -> None:
    time.sleep(seconds)
