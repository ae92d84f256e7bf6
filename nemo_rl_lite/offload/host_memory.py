"""Host memory for copies from and to the device, and the copies themselves.

The device's copy engines access pinned memory directly, at the link's speed. torch's `pin_memory=True` rounds sizes up
to a power of two and takes six times as long to allocate; here many threads touch the pages first, and then the driver
registers them.

Large copies are cut into pieces, so that other work on the device gets its turn: a thread launches a piece when the
one before is done. With one more piece in its queue, logprobs and a move took as long on an H100 as one after the
other (docs/memory.md), and small copies, such as a micro-batch's logprobs on their way to the host, waited behind
them.
"""

import logging
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import foreach_copy
from nemo_rl_lite.errors import HostMemoryError
from nemo_rl_lite.system.machine import free_host_bytes

log = logging.getLogger(__name__)
GIB = 2**30

# 2.5 ms on a link of 50 GB/s: a short wait for other work. Between two pieces the link is idle, 8 % of the time.
PIECE_BYTES = 128 << 20


class LockError(RuntimeError):
    """Memory that the driver did not register."""


class CudaRegistrar:
    """Locks memory and registers it with the CUDA driver (`cudaHostRegister`)."""

    def __init__(self) -> None:
        self._runtime: Any = torch.cuda.cudart()

    def lock(self, address: int, nbytes: int) -> None:
        """Lock `nbytes` from `address` on. Raises LockError: nothing is locked."""
        status = self._runtime.cudaHostRegister(address, nbytes, 0)
        if int(status) != 0:
            # The runtime keeps the error and would report it at the next kernel launch.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise LockError(f"cudaHostRegister: {self._runtime.cudaGetErrorString(status)}")

    def unlock(self, address: int) -> None:
        torch.cuda.check_error(self._runtime.cudaHostUnregister(address))


class HostArena:
    """Buffer of host memory for `purpose`, exact in size. It is allocated when first reserved, kept until `release`,
    and allocated again only to grow. Its pages are on the NUMA node of this process's CPUs."""

    def __init__(self, purpose: str, registrar: CudaRegistrar | None):
        self._purpose, self._registrar = purpose, registrar
        self._buffer: Tensor | None = None
        self.locked = False

    @property
    def nbytes(self) -> int:
        """Return the bytes that the buffer takes now."""
        return 0 if self._buffer is None else self._buffer.numel()

    def reserve(self, nbytes: int) -> Tensor:
        """Return the first `nbytes` of the buffer, as uint8 [nbytes]. Growing loses the contents.

        Raises:
            HostMemoryError: there is less free host memory than this takes.
        """
        if self._buffer is None or self._buffer.numel() < nbytes:
            self.release()
            free = free_host_bytes()
            if nbytes > free:
                raise HostMemoryError(
                    f"{self._purpose} need {nbytes / GIB:.2f} GiB of host memory on this rank and {free / GIB:.2f} GiB "
                    "are free. Give the job more memory, use fewer ranks a node, or keep less there: "
                    "policy.offload_for_generation and policy.offload_optimizer_states_for_logprob move parameters "
                    "and optimizer states, a KL penalty (algorithm.loss_fn.reference_policy_kl_penalty) keeps two "
                    "copies of the weights"
                )
            self._buffer = _touched(nbytes)
            self._lock(self._buffer)
        return self._buffer[:nbytes]

    def release(self) -> None:
        """Free the memory. Tensors from `reserve` must not be used any more."""
        if self._buffer is not None and self.locked and self._registrar is not None:
            self._registrar.unlock(self._buffer.data_ptr())
        self._buffer, self.locked = None, False

    def __del__(self) -> None:
        # If memory is freed while it is registered, a later mapping at its address fails.
        if not sys.is_finalizing():
            self.release()

    def _lock(self, buffer: Tensor) -> None:
        if self._registrar is None or not buffer.numel():
            return
        try:
            self._registrar.lock(buffer.data_ptr(), buffer.numel())
            self.locked = True
            log.info("%.2f GiB of host memory pinned for %s", buffer.numel() / GIB, self._purpose)
        except LockError as error:
            # The limit does not bind the driver everywhere, so it is only reported, not checked before.
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.2f} GiB"
            # Without a registrar, later growth neither retries nor warns again.
            self._registrar = None
            log.warning(
                "%.2f GiB of host memory for %s could not be pinned (%s; RLIMIT_MEMLOCK is %s), so its copies are "
                "pageable, several times slower. Raise the limit (ulimit -l unlimited; docker run --ulimit "
                "memlock=-1), or set policy.use_pinned_optimizer_offload=false",
                buffer.numel() / GIB,
                self._purpose,
                error,
                shown,
            )


def _touched(nbytes: int) -> Tensor:
    """Allocate memory of exactly this size, its pages written by as many threads as the process has CPUs."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        # Huge pages are faster to touch, where the kernel has them.
        pages.madvise(mmap.MADV_HUGEPAGE)
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        return torch.frombuffer(pages, dtype=torch.uint8).zero_()
    finally:
        torch.set_num_threads(threads)


class Copies:
    """Copies of bytes, uint8 [n], in a thread that starts at construction, after earlier work of the device's current
    stream."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: "torch.cuda.Stream | None"):
        """`pairs`: (target, source). `stream`: runs the copies; None on a CPU."""
        self._pairs, self._stream = list(pairs), stream
        self._began, self._seconds, self._alone = time.perf_counter(), 0.0, False
        self._error: BaseException | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._thread = threading.Thread(target=self._work, name="offload", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Return whether `wait` would return immediately."""
        return not self._thread.is_alive()

    def wait(self, alone: bool = False) -> None:
        """Wait until all copies are done. Raises any error that stopped them. `alone`: the device has no other work, so
        its queue may hold all pieces at once."""
        self._alone = alone
        self._thread.join()
        if self._error is not None:
            raise self._error

    def seconds(self) -> float:
        """Return the duration of the copies; valid when they are done."""
        return self._seconds

    def _work(self) -> None:
        try:
            if self._stream is None:
                for targets, sources in pieces(self._pairs):
                    foreach_copy(targets, sources, non_blocking=True)
                self._seconds = time.perf_counter() - self._began
            else:
                self._feed(self._stream)
        except BaseException as error:
            self._error = error
        finally:
            # Drop the references, so that storages can be freed.
            self._pairs = []

    def _feed(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            # A blocking event does not spin on a core while it is waited for.
            done = torch.cuda.Event(blocking=True)
            begin.record()
            for targets, sources in pieces(self._pairs):
                # One call for many: this thread has the interpreter in each, and takes it from the one that launches
                # kernels.
                foreach_copy(targets, sources, non_blocking=True)
                if not self._alone:
                    done.record()
                    done.synchronize()
            end.record()
            end.synchronize()
            self._seconds = begin.elapsed_time(end) / 1e3


def pieces(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Cut and gather the copies into pieces of `PIECE_BYTES`. Yields the targets and sources of each; the last may be
    smaller."""
    targets, sources, room = list[Tensor](), list[Tensor](), PIECE_BYTES
    for target, source in pairs:
        if target.numel() != source.numel():
            raise ValueError(f"a copy of {source.numel()} bytes to {target.numel()}")
        begin = 0
        while begin < source.numel():
            cut = slice(begin, begin + room)
            targets.append(target[cut])
            sources.append(source[cut])
            room -= sources[-1].numel()
            begin = cut.stop
            if room <= 0:
                yield targets, sources
                targets, sources, room = [], [], PIECE_BYTES
    if targets:
        yield targets, sources
