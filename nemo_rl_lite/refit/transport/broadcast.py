"""Weights from one producer to every consumer over a process group, with several buckets on the way at a time.

While bucket k is sent, the producer exports and packs bucket k + 1 and the consumers load bucket k - 1. A side waits
only for the broadcast from or into the buffer that it needs. On a GPU, what a consumer loads is ordered by its current
stream, and the broadcast that fills the buffer again is queued behind it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.refit.layout.packing import new_buffers
from nemo_rl_lite.refit.layout.plan import Bucket, RefitPlan
from nemo_rl_lite.refit.transport.buckets import BucketReceiver, Wire
from nemo_rl_lite.refit.transport.checksum import Verify
from nemo_rl_lite.refit.transport.group import Flight, RefitGroup


class BroadcastBuffers:
    """Buffers for `count` buckets at a time, on either side."""

    def __init__(self, plan: RefitPlan, count: int, device: torch.device):
        self.memory = new_buffers(plan, count, device)

    def offer(self) -> "BroadcastOffer":
        return BroadcastOffer(len(self.memory))

    def wire(self, group: RefitGroup) -> Wire:
        def start(buffer: Tensor, bucket: Bucket) -> Flight:
            return group.start(buffer, f"{bucket.describe()}, {bucket.nbytes} bytes")

        return Wire(group, len(self.memory), start, end=lambda buffer: None)


@dataclass(frozen=True)
class BroadcastOffer:
    """An `Offer` of `count` buckets at a time."""

    count: int

    def group_device(self, device: torch.device) -> torch.device:
        return device

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> BucketReceiver:
        buffers = BroadcastBuffers(plan, self.count, device)
        return BucketReceiver(plan, buffers.wire(group), buffers.memory, verify)
