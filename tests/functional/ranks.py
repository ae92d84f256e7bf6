"""Scripts in processes that are forked: ranks, which meet in torch.distributed, and single ones."""

import multiprocessing
import os
import random
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

PORTS_EACH = 40
_FORKED = multiprocessing.get_context("forkserver")


@contextmanager
def reserved_ports() -> Iterator[int]:
    """The first of `PORTS_EACH` free ports in a row, which no other test gets within the block: the port before them
    stays bound. The kernel, Ray and the package hand out lower ports."""
    for held in random.sample(range(61_000, 65_500, 1 + PORTS_EACH), 100):
        with socket.socket() as reservation, ExitStack() as probes:
            try:
                reservation.bind(("", held))
                for port in range(held + 1, held + 1 + PORTS_EACH):
                    probes.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            probes.close()
            yield held + 1
            return
    raise RuntimeError("no free ports")


def run_ranks(
    script: Path, arguments: Sequence[str], ranks: int, timeout_s: float = 900, interprets: bool = False
) -> list[str]:
    """Run `script` once a rank, with torch.distributed's environment, and return what each rank printed. Fails with
    what the ranks that failed printed. `interprets`: Triton's interpreter runs kernels on the CPU."""
    with tempfile.TemporaryDirectory() as folder, reserved_ports() as port:
        return _run_ranks(script, arguments, ranks, timeout_s, Path(folder), port, interprets)


def _run_ranks(
    script: Path, arguments: Sequence[str], ranks: int, timeout_s: float, folder: Path, port: int, interprets: bool
) -> list[str]:
    # A rank that ends closes its connections, and the first one torch.distributed's store, which others may still need.
    processes, ended = [], _context(interprets).Barrier(ranks)
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
            environ |= {"TRITON_INTERPRET": "1"} if interprets else {}
            processes.append(start_script(script, arguments, environ, folder / str(rank), ended, interprets))
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


def start_script(
    script: Path,
    arguments: Sequence[str | Path],
    environ: Mapping[str, str],
    log: Path,
    ended: Barrier | None = None,
    is_new: bool = False,
) -> BaseProcess:
    """Start what `python script arguments` would do in this environment, with its output in the file `log`. The process
    is forked from one that has imported megatron-core and vLLM; with GPUs or if it `is_new`, it is a new one. After its
    last line it waits for `ended`."""
    own = (str(script), list(map(str, arguments)), dict(environ), str(log), ended)
    process = _context(is_new).Process(target=_run, args=own)
    process.start()
    return process


def _context(new: bool = False) -> BaseContext:
    """Return how processes start. Triton reads its environment when it is imported, so some must be new."""
    return multiprocessing.get_context("spawn") if new or torch.cuda.is_available() else preloaded()


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


def _run(script: str, arguments: list[str], environ: dict[str, str], log: str, ended: Barrier | None) -> None:
    """What `python script arguments` would do in this environment; its output goes to the file `log`."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    if ended is not None:
        ended.wait()
