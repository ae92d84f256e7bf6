"""Workers for tests of what the launcher makes of them."""

import ctypes
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import psutil
import ray
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from nemo_rl_lite.config.engines import EngineHost
from nemo_rl_lite.generation.interface import EngineLoad
from nemo_rl_lite.observability.liveness import note_progress
from nemo_rl_lite.observability.timer import SETUP


class Quiet:
    """Does nothing, and says so."""

    def answer(self) -> str:
        return "here"

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


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


def kill_rank(log: Path) -> None:
    """Kill the first of vLLM's rank processes of the engine with this log."""
    engine = psutil.Process(int(log.read_text().split()[1]))
    next(one for one in engine.children() if "VLLM::" in "".join(one.cmdline())).kill()


def compute_for_ever(seconds: float) -> None:
    time.sleep(seconds)


class FirstHost:
    """The first host of an engine, which meets the others as vLLM's does, and says who came."""

    def __init__(self, host: EngineHost, **others: Any):
        self._seen = [_here(host.index)]
        with Listener(host.addresses[0]) as listening:
            for _ in host.addresses[1:]:
                with listening.accept() as connection:
                    self._seen.append(connection.recv())

    def seen(self) -> list[tuple[int, str, str]]:
        """Index, node and GPUs of each host."""
        return sorted(self._seen)


class OtherHost:
    """Another host of the engine."""

    def __init__(self, host: EngineHost, **others: Any):
        for _ in range(100):
            try:
                with Client(host.addresses[0]) as connection:
                    connection.send(_here(host.index))
                return
            except ConnectionRefusedError:
                time.sleep(0.1)


def _here(index: int) -> tuple[int, str, str]:
    return index, ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


class StuckEngine:
    """An engine whose first step does not end: in Python code, or in C code that keeps Python from running."""

    def __init__(self, keeps_python: bool):
        self.keeps_python = keeps_python

    def submit(self, requests): ...

    def abort(self, numbers): ...

    def load(self):
        return EngineLoad()

    def step(self):
        compute_in_c() if self.keeps_python else time.sleep(600)


def compute_in_c() -> None:
    # A `PyDLL` keeps the GIL.
    ctypes.PyDLL(None).sleep(600)


class SlowStart:
    """Starts in two parts. The second one ends when the file `go_on` exists."""

    def __init__(self, go_on: str, fails: bool):
        if fails:
            raise RuntimeError("it fails")
        SETUP.add("cuda_graphs", 0.1)
        deadline = time.monotonic() + 200
        while not Path(go_on).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
