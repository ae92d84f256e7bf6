"""Weights between processes that share a device: a buffer which the producer fills and the consumers read.

On a GPU it is CUDA memory opened through an IPC handle, on a CPU a file in memory. Each connection opens it once. It
has two halves: while consumers load one bucket, the producer fills the other half with the next.
"""

import os
import weakref
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import open_cuda_tensor, share_cuda_tensor
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.layout.packing import new_buffers
from nemo_rl_lite.refit.layout.plan import Bucket, RefitPlan
from nemo_rl_lite.refit.transport.buckets import BucketReceiver, Wire
from nemo_rl_lite.refit.transport.checksum import Verify
from nemo_rl_lite.refit.transport.group import Flight, RefitGroup
from nemo_rl_lite.refit.transport.interface import settle


def meetings(group: RefitGroup) -> Wire:
    """A wire on which all ranks meet once for each bucket. Then the bucket is complete, and the one before it has been
    loaded, so that its half may be filled next."""

    def start(buffer: Tensor, bucket: Bucket) -> Flight:
        settle(buffer)
        return group.start_meeting(bucket.describe())

    def end(buffer: Tensor) -> None:
        settle(buffer)
        group.meet("the end of the refit")

    return Wire(group, 1, start, end)


@dataclass(frozen=True)
class SharedOffer:
    """An `Offer` of a buffer, uint8 [halves, half_bytes], that another process on the device can open: by a CUDA IPC
    handle, or by the path of a file in memory that ends with the producer's process."""

    cuda: tuple[Any, ...] | None
    file: str | None
    halves: int
    half_bytes: int

    def open(self) -> Tensor:
        """The buffer, in this process."""
        if self.cuda is not None:
            return open_cuda_tensor(self.cuda)
        if self.file is None:
            raise ValueError("an offer of a buffer has a CUDA handle or a file")
        size = self.halves * self.half_bytes
        return torch.from_file(self.file, shared=True, size=size, dtype=torch.uint8).view(self.halves, -1)

    def group_device(self, device: torch.device) -> torch.device:
        # Only small messages travel.
        return torch.device("cpu")

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> BucketReceiver:
        return BucketReceiver(plan, meetings(group), self.open(), verify)


class SharedBuffer:
    """The producer's buffer for the plan's largest bucket, twice if the plan has several. It is kept for as long as
    anybody may open it or has it open."""

    def __init__(self, plan: RefitPlan, device: torch.device):
        """Raises RefitError: the machine does not have the memory."""
        self._file: str | None = None
        halves, half_bytes = min(2, len(plan.buckets)), max(bucket.nbytes for bucket in plan.buckets)
        if device.type == "cuda":
            self.memory = new_buffers(plan, halves, device)
            return
        size, free = halves * half_bytes, psutil.virtual_memory().available
        if size > free:
            raise RefitError(
                f"the refit's buffer needs {size} bytes of host memory and {free} are free; see refit.bucket_bytes"
            )
        # Unlike a file in /dev/shm, one in memory is not subject to the small limit that containers put there.
        file = os.memfd_create("nemo_rl_lite-refit")
        weakref.finalize(self, os.close, file)
        os.truncate(file, size)
        self._file = f"/proc/{os.getpid()}/fd/{file}"
        self.memory = SharedOffer(None, self._file, halves, half_bytes).open()

    def wire(self, group: RefitGroup) -> Wire:
        return meetings(group)

    def offer(self) -> SharedOffer:
        """The offer for one connection, each of which needs its own CUDA handle."""
        cuda = share_cuda_tensor(self.memory) if self._file is None else None
        return SharedOffer(cuda, self._file, *self.memory.shape)
