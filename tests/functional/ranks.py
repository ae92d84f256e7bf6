"""Scripts in processes that are forked: ranks, which meet in torch.distributed, and single ones."""

import multiprocessing
import os
import random
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

_FORKED = multiprocessing.get_context("forkserver")


def free_ports(count: int = 40) -> int:
    """The first of `count` ports in a row that no one has: below those that the kernel hands out and above Ray's, so
    that no one comes to have them soon."""
    for first in random.sample(range(20_000, 32_000, count), 20):
        with ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports")


def run_ranks(script: Path, arguments: Sequence[str], ranks: int, timeout_s: float = 900) -> list[str]:
    """Run `script` once a rank, with torch.distributed's environment, and return what each rank printed. Fails with
    what the ranks that failed printed."""
    with tempfile.TemporaryDirectory() as folder:
        return _run_ranks(script, arguments, ranks, timeout_s, Path(folder))


def _run_ranks(script: Path, arguments: Sequence[str], ranks: int, timeout_s: float, folder: Path) -> list[str]:
    port, processes = free_ports(), []
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu] or list(range(ranks))
    try:
        for rank in range(ranks):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "MASTER_PORT": port,
                "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)],
            }
            own = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
            environ = dict(os.environ) | own | {"TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
            processes.append(start_script(script, arguments, environ, folder / str(rank)))
        deadline = time.monotonic() + timeout_s
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.join()
    logs = [folder / str(rank) for rank in range(ranks)]
    outputs = [log.read_text() if log.exists() else "" for log in logs]
    failed = [rank for rank in range(ranks) if processes[rank].exitcode]
    assert not failed, "\n".join(f"rank {rank}:\n{outputs[rank][-4000:]}" for rank in failed)
    return outputs


def start_script(script: Path, arguments: Sequence[str | Path], environ: Mapping[str, str], log: Path) -> BaseProcess:
    """Start what `python script arguments` would do in this environment, with its output in the file `log`. The process
    is forked from one that has imported megatron-core and vLLM; with GPUs it is a new one."""
    context = multiprocessing.get_context("spawn") if torch.cuda.is_available() else preloaded()
    process = context.Process(target=_run, args=(str(script), list(map(str, arguments)), dict(environ), str(log)))
    process.start()
    return process


def run_script(
    script: Path, arguments: Sequence[str | Path], environ: Mapping[str, str], log: Path, timeout_s: float = 600
) -> None:
    """Run `script` in a forked process (see `start_script`). Fails with its output where its status is not 0."""
    process = start_script(script, arguments, environ, log)
    process.join(timeout_s)
    process.kill()
    process.join()
    assert process.exitcode == 0, log.read_text()[-4000:] if log.exists() else "it has said nothing"


@cache
def preloaded() -> multiprocessing.context.ForkServerContext:
    """The context whose server has imported what `forked.py` imports. A process has one server, which other tests may
    have started."""
    forkserver._forkserver._stop()
    _FORKED.set_forkserver_preload(["tests.functional.forked"])
    return _FORKED


def _run(script: str, arguments: list[str], environ: dict[str, str], log: str) -> None:
    """What `python script arguments` would do in this environment; its output goes to the file `log`."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
