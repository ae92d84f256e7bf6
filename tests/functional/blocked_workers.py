"""A policy rank whose work waits for a lost one, as in an NCCL kernel: only another thread can free it."""

import os
import threading
import time

_freed = threading.Event()


def beat(frees: bool) -> None:
    """Free the rank, as an abort of NCCL's communicators does."""
    if frees:
        _freed.set()


class Blocked:
    """Closes, unless it `fails` or it is `stuck`."""

    def __init__(self, closing: str):
        self._closing = closing

    def process(self) -> int:
        return os.getpid()

    def train(self) -> str:
        assert _freed.wait(600)
        _freed.clear()
        return "wrong weights"

    def is_freed(self) -> bool:
        return _freed.is_set()

    def close(self, is_rank_lost: bool) -> None:
        assert is_rank_lost
        # A heartbeat may free a rank that waits for nothing, until it closes.
        _freed.clear()
        if self._closing == "stuck":
            time.sleep(600)
        if self._closing == "fails":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
