"""Ranks of a refit group, each in its own process."""

import io
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from typing import Any
from unittest.mock import patch

import cloudpickle
import torch

# The first operation that a loader is watched at imports these, which takes seconds on a busy machine.
import torch._dynamo
import torch.distributed.fsdp

from nemo_rl_lite.refit import group as refit_group
from nemo_rl_lite.refit.group import RefitGroup, Rendezvous

CPU = torch.device("cpu")

# Threads of one process make gloo crash now and then, and a child of this process, which has threads, may never get
# beyond a lock that one of them held. The server has none, and its children need no imports of their own.
_FORKS = multiprocessing.get_context("forkserver")
# Seconds for a rank to start on a busy machine. What it runs is read in them too: reading may import anything that the
# test's process has imported.
_START = 90.0
# Seconds until a rank that has joined gives up where a peer does not answer.
SHORT = 2.0


def run(rank_functions: list[Callable[[RefitGroup], Any]], timeout_s: float = 60.0, wanted: int | None = None) -> list:
    """Each function gets its rank's group; results, or exceptions, in rank order, of the first `wanted` ranks."""
    # Of no effect where the server runs already, with what functional tests need.
    _FORKS.set_forkserver_preload(["tests.unit.refit.ranks"])
    store = refit_group.host_store("127.0.0.1", _START)
    size, all_done = len(rank_functions), _FORKS.Event()
    all_started = _FORKS.Barrier(size)
    pipes = [_FORKS.Pipe(duplex=False) for _ in rank_functions]
    places = [Rendezvous("127.0.0.1", store.port, rank, size) for rank in range(size)]
    processes = [
        _FORKS.Process(
            target=_rank_main,
            args=(_pickled(function), meeting, timeout_s, sending, all_started, all_done),
            daemon=True,
        )
        for function, meeting, (_, sending) in zip(rank_functions, places, pipes, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + 2 * _START + 3 * timeout_s
        for rank, (receiving, _) in enumerate(pipes[:wanted]):
            assert receiving.poll(deadline - time.monotonic()), f"rank {rank} gave no result"
        return [pickle.loads(receiving.recv_bytes()) for receiving, _ in pipes[:wanted]]
    finally:
        all_done.set()
        for process in processes:
            # Those that are not wanted may still wait for a peer.
            process.join(5 if wanted is None else 0)
            process.kill()


def _pickled(function: Callable[[RefitGroup], Any]) -> bytes:
    """A function and the tensors that it refers to. Where this process has imported megatron-core, tensors are pickled
    so that their reader imports it too, which takes a rank several seconds: not here."""
    with patch("torch.storage._load_from_bytes", _load_from_bytes):
        return cloudpickle.dumps(function)


def _load_from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def _rank_main(
    function: bytes,
    rendezvous: Rendezvous,
    timeout_s: float,
    sending: Connection,
    all_started: Barrier,
    all_done: Event,
) -> None:
    try:
        torch.set_num_threads(1)
        call = pickle.loads(function)
        all_started.wait(_START)
        group = refit_group.join_at(rendezvous, CPU, _START)
        result = call(replace(group, timeout=timedelta(seconds=timeout_s)))
    except Exception as error:
        result = error
    sending.send_bytes(cloudpickle.dumps(result))
    # A connection that ends early would be a peer's error.
    all_done.wait(600)
    os._exit(0)
