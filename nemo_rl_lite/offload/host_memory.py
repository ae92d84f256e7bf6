"""Pinned host memory, and copies between it and the device.

torch's `pin_memory=True` rounds sizes up to a power of two and allocates slowly. Here many threads touch the pages,
and then the driver registers them.

A thread launches large copies in chunks, one at a time. More chunks in the device's queue would block other work,
such as the copy of a micro-batch's logprobs to the host.
"""

import logging
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import foreach_copy
from nemo_rl_lite.errors import HostMemoryError
from nemo_rl_lite.system.machine import free_host_bytes

log = logging.getLogger(__name__)
GIB = 2**30

# Alignment of tensors in host memory, in bytes.
ALIGNMENT = 512
# 2.5 ms at 50 GB/s: short for work that waits, long compared with the link's idle time between chunks.
CHUNK_BYTES = 128 << 20


class LockError(RuntimeError):
    """The driver did not register memory."""


class CudaRegistrar:
    """Pins memory with `cudaHostRegister`."""

    def __init__(self) -> None:
        self._runtime: Any = torch.cuda.cudart()

    def lock(self, address: int, nbytes: int) -> None:
        """Pin `nbytes` from `address`. Raises LockError: nothing is pinned."""
        status = self._runtime.cudaHostRegister(address, nbytes, 0)
        if int(status) != 0:
            # Clear the error, which the runtime would report at the next kernel launch.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise LockError(f"cudaHostRegister: {self._runtime.cudaGetErrorString(status)}")

    def unlock(self, address: int) -> None:
        torch.cuda.check_error(self._runtime.cudaHostUnregister(address))


class HostArena:
    """Buffer of host memory for `purpose`, allocated at the first `reserve`, kept until `release`, reallocated only to
    grow. Its pages are on the NUMA node of this process's CPUs."""

    def __init__(self, purpose: str, registrar: CudaRegistrar | None):
        self._purpose, self._registrar = purpose, registrar
        self._buffer: Tensor | None = None
        self.locked = False

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel()

    def reserve(self, nbytes: int) -> Tensor:
        """Return the first `nbytes` of the buffer, uint8 [nbytes]. Growing loses the contents. Raises HostMemoryError:
        free host memory is too small."""
        if self._buffer is None or self._buffer.numel() < nbytes:
            self.release()
            free = free_host_bytes()
            if nbytes > free:
                raise HostMemoryError(
                    f"{self._purpose} need {nbytes / GIB:.2f} GiB of host memory on this rank, but {free / GIB:.2f} "
                    "GiB are free. Give the job more memory, use fewer ranks per node, or offload less: "
                    "policy.offload_for_generation and policy.offload_optimizer_states_for_logprob move parameters "
                    "and optimizer states; a KL penalty (algorithm.loss_fn.reference_policy_kl_penalty) keeps two "
                    "copies of the weights"
                )
            self._buffer = _touched(nbytes)
            self._lock(self._buffer)
        return self._buffer[:nbytes]

    def release(self) -> None:
        """Free the memory, and with it all tensors from `reserve`."""
        if self._buffer is not None and self.locked and self._registrar is not None:
            self._registrar.unlock(self._buffer.data_ptr())
        self._buffer, self.locked = None, False

    def __del__(self) -> None:
        # A mapping at the address of freed but registered memory would fail.
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
            # Not every driver obeys the limit, so it is reported but not checked.
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.2f} GiB"
            # Prevents further attempts and warnings.
            self._registrar = None
            log.warning(
                "%.2f GiB of host memory for %s could not be pinned (%s; RLIMIT_MEMLOCK is %s), so copies are several "
                "times slower. Raise the limit (ulimit -l unlimited; docker run --ulimit memlock=-1), or set "
                "policy.use_pinned_optimizer_offload=false",
                *(buffer.numel() / GIB, self._purpose, error, shown),
            )


def copies_in(arena: HostArena, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of any device to the arena, blocking. Each copy has its own storage, because `torch.save` writes
    whole storages. The next call overwrites the copies. Raises HostMemoryError as `reserve` does."""
    begins = [0, *accumulate(-(-one.nbytes // ALIGNMENT) * ALIGNMENT for one in tensors)]
    host, copies = arena.reserve(begins[-1]).numpy(), list[Tensor]()
    for one, begin in zip(tensors, begins, strict=False):
        if one.numel():
            copy = torch.frombuffer(host, dtype=one.dtype, count=one.numel(), offset=begin).view(one.shape)
            copies.append(copy.copy_(one.detach(), non_blocking=True))
        else:
            copies.append(torch.empty_like(one, device="cpu"))
    if any(one.is_cuda for one in tensors):
        torch.cuda.current_stream().synchronize()
    return copies


def _touched(nbytes: int) -> Tensor:
    """Allocate memory of exactly this size, and write its pages with one thread per CPU of the process."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Huge pages are faster to touch, if the kernel has them.
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        return torch.frombuffer(pages, dtype=torch.uint8).zero_()
    finally:
        torch.set_num_threads(threads)


class Copies:
    """Copies in a thread that starts at construction, ordered after earlier work of the device's current stream."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: "torch.cuda.Stream | None"):
        """`pairs`: (target, source), uint8 [n] each. `stream`: for the copies; None on a CPU."""
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
        """Wait until all copies are done, and raise their error, if any. `alone`: the device has no other work, so its
        queue may hold all chunks."""
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
                for targets, sources in chunks(self._pairs):
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
            # Waiting on a blocking event does not spin on a core.
            done = torch.cuda.Event(blocking=True)
            begin.record()
            for targets, sources in chunks(self._pairs):
                # One call, because each takes the GIL from the thread that launches kernels.
                foreach_copy(targets, sources, non_blocking=True)
                if not self._alone:
                    done.record()
                    done.synchronize()
            end.record()
            end.synchronize()
            self._seconds = begin.elapsed_time(end) / 1e3


def chunks(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield the targets and sources of chunks of `CHUNK_BYTES`; the last one may be smaller."""
    targets, sources, room = list[Tensor](), list[Tensor](), CHUNK_BYTES
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
                targets, sources, room = [], [], CHUNK_BYTES
    if targets:
        yield targets, sources
