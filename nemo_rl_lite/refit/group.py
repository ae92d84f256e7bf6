"""A process group of the refit's own: rank 0 sends, ranks 1.. receive."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore


@dataclass(frozen=True)
class RefitGroup:
    """One producer and its consumers, outside every default group of the engines it connects."""

    group: ProcessGroup
    rank: int
    device: torch.device
    timeout: timedelta

    def broadcast(self, tensor: Tensor) -> None:
        """Send (rank 0) or fill (others) `tensor`, in place.

        Raises:
            RuntimeError: not done within the timeout, or a peer is gone.
        """
        self.group.broadcast(tensor, 0).wait(self.timeout)


def host_store(host: str, timeout_s: float) -> TCPStore:
    """The meeting point, opened by the producer on a free port (`.port`)."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join(store: TCPStore, rank: int, world_size: int, timeout_s: float) -> RefitGroup:
    """Join the group; returns when all `world_size` ranks have."""
    timeout = timedelta(seconds=timeout_s)
    group: Any = ProcessGroupGloo(PrefixStore("refit", store), rank, world_size, timeout)
    return RefitGroup(group, rank, torch.device("cpu"), timeout)


def join_at(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> RefitGroup:
    """Join the group whose store the producer opened at `host:port`."""
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return join(store, rank, world_size, timeout_s)
