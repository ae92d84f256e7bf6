"""Weights between processes that share a device: a staging buffer which the producer fills and the consumers read.

On a GPU it is CUDA memory opened through an IPC handle, on a CPU a file in shared memory; either is opened once. It has
two halves: while consumers load one bucket, the producer fills the other half with the next.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.checksum import Checksums, Verify
from nemo_rl_lite.refit.group import RefitGroup
from nemo_rl_lite.refit.packing import Arrived, Export, buffer_of, new_buffers
from nemo_rl_lite.refit.plan import RefitPlan
from nemo_rl_lite.refit.report import RefitReport


@dataclass(frozen=True)
class StagingHandle:
    """What another process on the same device needs to open the buffer: a CUDA IPC handle, or the path of a file in
    memory, which is the producer's own, so that nothing is left however the run ends."""

    cuda: tuple[Any, ...] | None
    file: str | None
    halves: int
    half_bytes: int

    def open(self) -> Tensor:
        """The buffer, uint8 [halves, half_bytes], in this process."""
        if self.cuda is not None:
            rebuild, arguments = self.cuda
            device = torch.cuda.current_device()
            # The producer's number for the device need not be ours.
            own = [device if index == _DEVICE_ARGUMENT else value for index, value in enumerate(arguments)]
            return rebuild(*own)
        if self.file is None:
            raise ValueError("a staging handle has a CUDA handle or a file")
        size = self.halves * self.half_bytes
        return torch.from_file(self.file, shared=True, size=size, dtype=torch.uint8).view(self.halves, -1)


# Where torch.multiprocessing.reductions.reduce_tensor puts the device's number.
_DEVICE_ARGUMENT = 6


def new_staging(plan: RefitPlan, device: torch.device) -> tuple[Tensor, StagingHandle]:
    """A buffer for the plan's largest bucket, twice where there are several, and the handle to open it elsewhere.

    The producer keeps the tensor for as long as anybody uses it, and calls `forget` on the handle when all have opened
    it.

    Raises:
        RefitError: the machine does not have the memory.
    """
    halves, half_bytes = min(2, len(plan.buckets)), max(bucket.nbytes for bucket in plan.buckets)
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        staging = new_buffers(plan, halves, device)
        return staging, StagingHandle(reduce_tensor(staging), None, halves, half_bytes)
    size = halves * half_bytes
    free = psutil.virtual_memory().available
    if size > free:
        raise RefitError(
            f"the refit's buffer needs {size} bytes of host memory and {free} are free; see refit.bucket_bytes"
        )
    # Unlike a file in /dev/shm it has no limit of its own, which containers keep small.
    file = os.memfd_create("nemo_rl_lite-refit")
    os.truncate(file, size)
    handle = StagingHandle(None, f"/proc/{os.getpid()}/fd/{file}", halves, half_bytes)
    return handle.open(), handle


def forget(handle: StagingHandle) -> None:
    """Close the file once every consumer has opened it; the memory lives as long as somebody has it open."""
    if handle.file is not None:
        os.close(int(Path(handle.file).name))


class IpcSender:
    """The producer's side: `send` as often as there are new weights."""

    def __init__(self, plan: RefitPlan, group: RefitGroup, staging: Tensor, verify: Verify):
        self._plan, self._group, self._staging, self._verify = plan, group, staging, verify

    def send(self, export: Export) -> RefitReport:
        """Lay what is exported into the staging buffer, bucket by bucket.

        Stages timed, beside those of the export: `transfer` (waiting for consumers).

        Raises:
            RefitError: tensors that are not the plan's, or a consumer that did not take a bucket in time.
        """
        report, checksums = RefitReport(), Checksums(self._verify)
        self._group.announce(self._plan.digest)
        for index, bucket in enumerate(self._plan.buckets):
            export.begin(index, report)
            buffer = self.buffer(index)
            export.fill(index, buffer, report)
            clock = time.perf_counter()
            checksums.add(buffer)
            _settle(buffer)
            clock = report.add("pack", clock)
            # Consumers come here when they have loaded the bucket before: its half may be filled next.
            self._group.meet(bucket.describe())
            report.add("transfer", clock)
        clock = time.perf_counter()
        self._group.meet("the end of the refit")
        report.add("transfer", clock)
        report.checksums = checksums.values()
        return report

    def buffer(self, index: int) -> Tensor:
        """The memory that bucket `index` is read from."""
        return buffer_of(self._plan, self._staging, index)


class IpcReceiver:
    """One refit on the consumer's side: iterate over it for bucket after bucket, in the staging buffer or, with `keep`,
    in memory of its own.

    Once the iteration is over, `report` has the checksums and the seconds of `transfer`.
    """

    def __init__(self, plan: RefitPlan, group: RefitGroup, staging: Tensor, verify: Verify, keep: bool):
        self.report = RefitReport()
        self._plan, self._group, self._staging = plan, group, staging
        self._verify, self._keep = verify, keep

    def __iter__(self) -> Iterator[Arrived]:
        """Raises RefitError: another plan than the producer's, or a bucket that did not arrive in time."""
        checksums = Checksums(self._verify)
        self._group.expect(self._plan.digest)
        for index, bucket in enumerate(self._plan.buckets):
            clock = time.perf_counter()
            self._group.meet(bucket.describe())
            self.report.add("transfer", clock)
            buffer = buffer_of(self._plan, self._staging, index)
            checksums.add(buffer)
            yield Arrived(index, bucket, buffer.clone() if self._keep else buffer)
            _settle(buffer)
        self._group.meet("the end of the refit")
        self.report.checksums = checksums.values()


def _settle(buffer: Tensor) -> None:
    """Wait until the device has done what was asked of it; the other process does not see our streams."""
    if buffer.is_cuda:
        torch.cuda.current_stream().synchronize()
