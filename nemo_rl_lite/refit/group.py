"""Process groups of refits: a producer (rank 0) with its consumers (1..), and ranks that exchange parameters."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from nemo_rl_lite.compat.torch import nccl_options
from nemo_rl_lite.errors import LostTouchError, RefitError

_POLL_S = 0.0002
_HASH = "the plan's hash"


@dataclass(frozen=True)
class Rendezvous:
    """Address of a producer, and a consumer's rank (1 or more) in the group of `world_size` ranks."""

    host: str
    port: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class RefitGroup:
    """A producer and its consumers, outside the engines' default groups."""

    group: Any
    """Backend of a torch process group: gloo's or NCCL's."""
    rank: int
    device: torch.device
    timeout: timedelta

    def start(self, tensor: Tensor, what: str) -> "PendingTransfer":
        """Start a broadcast of `tensor` on `device` from rank 0, in place, after the current stream's work. All ranks
        start the same broadcasts in the same order; several may be in flight. Raises LostTouchError: a peer is gone."""
        return self._begin(lambda: self.group.broadcast(tensor, 0), f"broadcast {what}")

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Broadcast `tensor` from rank 0, blocking. Raises LostTouchError: timeout, or a peer is gone."""
        self.start(tensor, what).finish()

    def announce(self, digest: bytes) -> None:
        """Send the hash of the producer's plan."""
        self.broadcast(torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self.device), _HASH)

    def expect(self, digest: bytes) -> None:
        """Receive the hash of the producer's plan. Raises RefitError: it is not `digest`."""
        announced = torch.zeros(len(digest), dtype=torch.uint8, device=self.device)
        self.broadcast(announced, _HASH)
        if bytes(announced.tolist()) != digest:
            raise RefitError("producer and consumer have different plans; connect the refit again")

    def send_message(self, message: bytes) -> None:
        """Send all consumers the same bytes."""
        self.broadcast(torch.tensor([len(message)], device=self.device), "the length of a message")
        self.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self.device), "a message")

    def receive_message(self) -> bytes:
        """Return bytes from the producer. Raises LostTouchError: timeout, or the producer is gone."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.broadcast(length, "the length of a message")
        message = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        self.broadcast(message, "a message")
        return message.cpu().numpy().tobytes()

    def start_barrier(self, what: str) -> "PendingTransfer":
        """Start an operation that completes when all ranks have started it."""
        return self._begin(lambda: self.group.allreduce(torch.zeros(1)), f"agree on {what}")

    def barrier(self, what: str) -> None:
        """Wait for all ranks. Raises LostTouchError: timeout, or a peer is gone."""
        self.start_barrier(what).finish()

    def _begin(self, start: Callable[[], Any], action: str) -> "PendingTransfer":
        with self.naming(action):
            return PendingTransfer(self, start(), action)

    @contextmanager
    def naming(self, action: str) -> Iterator[None]:
        """Convert the backend's errors within the block into LostTouchError, which names the action."""
        try:
            yield
        except RuntimeError as error:
            limit, cause = self.timeout.total_seconds(), str(error).splitlines()[0]
            raise LostTouchError(f"rank {self.rank} could not {action} (limit {limit:g} s): {cause}") from error


_on_gpus: WeakSet[RefitGroup] = WeakSet()


def nccl_backends() -> list[Any]:
    """Return the backends of this process's groups on GPUs, which torch.distributed does not know."""
    return [one.group for one in list(_on_gpus)]


@dataclass
class PendingTransfer:
    """A collective operation in flight."""

    _group: RefitGroup
    _work: Any
    _action: str
    _done: bool = False

    def finish(self) -> None:
        """Wait until the operation is done; may be repeated. Raises LostTouchError: timeout, or a peer is gone."""
        if self._done:
            return
        with self._group.naming(self._action):
            if self._group.device.type == "cpu":
                self._work.wait(self._group.timeout)
            else:
                # NCCL's wait only orders streams, and its watchdog would end the process.
                deadline = time.monotonic() + self._group.timeout.total_seconds()
                while not self._work.is_completed():
                    if time.monotonic() > deadline:
                        raise RuntimeError("timed out")
                    time.sleep(_POLL_S)
                self._work.wait()
        self._done = True


def host_store(host: str, timeout_s: float) -> TCPStore:
    """Open a producer's rendezvous on a free port (`.port`)."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def client_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to a producer's rendezvous."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join(
    store: TCPStore, rank: int, world_size: int, device: torch.device, timeout_s: float, name: str = "refit"
) -> RefitGroup:
    """Join the group (NCCL for a CUDA `device`, gloo for the CPU); returns when all ranks have joined. `name`: of the
    group, unique in the store."""
    timeout = timedelta(seconds=timeout_s)
    prefixed = PrefixStore(name, store)
    if device.type == "cpu":
        group: Any = ProcessGroupGloo(prefixed, rank, world_size, timeout)
    else:
        from torch.distributed import ProcessGroupNCCL

        # The refit's limit comes first, because NCCL's watchdog ends the process without naming the action.
        group = ProcessGroupNCCL(prefixed, rank, world_size, nccl_options(2 * timeout))
    joined = RefitGroup(group, rank, device, timeout)
    if device.type == "cuda":
        _on_gpus.add(joined)
    # NCCL connects at the first message.
    joined.broadcast(torch.zeros(8, dtype=torch.uint8, device=device), "a first message")
    return joined


def join_at(rendezvous: Rendezvous, device: torch.device, timeout_s: float) -> RefitGroup:
    """Join the group whose producer waits at `rendezvous`."""
    store = client_store(rendezvous.host, rendezvous.port, timeout_s)
    return join(store, rendezvous.rank, rendezvous.world_size, device, timeout_s)


def group_by_need(
    needed: set[int] | None, groups: Sequence[dist.ProcessGroup], timeout_s: float
) -> tuple[list[int], dist.ProcessGroup | None]:
    """Return the ranks that share weights with this rank, itself included, and their process group. Collective over the
    default group.

    `needed`: the ranks whose parameters this rank reads; None without consumers. `groups`: existing groups to reuse.
    Returns no ranks if no rank needs this one, and no group for a single rank.
    """
    rank = dist.get_rank()
    together = connected({one: ranks for one, ranks in enumerate(all_gather(needed)) if ranks is not None})
    ranks = next((ranks for ranks in together if rank in ranks), [])
    group: Any = next((one for one in groups if dist.get_process_group_ranks(one) == ranks), None)
    if not all(all_gather(group is not None or len(ranks) < 2)):
        # See `join`.
        limit = timedelta(seconds=2 * timeout_s)
        made = {tuple(ranks): dist.new_group(ranks, timeout=limit) for ranks in together if len(ranks) > 1}
        group = made.get(tuple(ranks))
    return ranks, group if len(ranks) > 1 else None


def connected(needs: Mapping[int, set[int]]) -> list[list[int]]:
    """Return connected components of ranks. `needs`: for each rank that reads parameters, the ranks that have them."""
    groups: list[set[int]] = []
    for rank, needed in needs.items():
        together = {rank} | needed
        for group in [group for group in groups if group & together]:
            groups.remove(group)
            together |= group
        groups.append(together)
    return sorted(sorted(group) for group in groups)


def all_gather(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of the group (None: the default group), in rank order."""
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, own, group=group)
    return given
