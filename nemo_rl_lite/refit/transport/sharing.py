"""Parameters that policy ranks share with processes which copy them: where they are, and how they are opened.

The weights of one rank may be spread over several ranks of its machine. Those share together: each of them sends its
consumers where the parameters of all of them are, and none moves its parameters before the consumers of all are done.
"""

import json
import logging
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.errors import LostTouchError, RefitError
from nemo_rl_lite.refit.layout.views import Recipe, source_ranks
from nemo_rl_lite.refit.transport import device_memory
from nemo_rl_lite.refit.transport.interface import settle
from nemo_rl_lite.refit.transport.rank_groups import all_gather, group_by_need

log = logging.getLogger(__name__)

Key = tuple[int, int]
"""A policy rank, and the number of one of its parameters."""
Parameters = Mapping[Key, Tensor]
"""Contiguous; as uint8 [bytes] if it is another process's."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Memory(Protocol):
    """How processes share a device's memory: the module `device_memory` on GPUs."""

    def allocation(self, tensor: Tensor) -> int: ...

    def handle(self, address: int) -> bytes: ...

    def opened(self, handles: Iterable[bytes]) -> AbstractContextManager[dict[bytes, int]]: ...

    def tensor_at(self, address: int, nbytes: int) -> Tensor: ...


class Sharing:
    """One policy rank's share. A method that is collective is called by all ranks of the group."""

    def __init__(
        self,
        parameters: Mapping[int, Tensor],
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        memory: Memory = device_memory,
    ):
        """`parameters`: this rank's by number, contiguous; they may move between refits. `ranks`: those that share
        together, this one included. `group`: their process group, None for a single rank."""
        self._parameters, self._rank, self._ranks, self._group = parameters, rank, ranks, group
        self._memory = memory

    def addresses(self) -> bytes:
        """Where the parameters of all ranks are now, once all ranks' devices are done with them; collective.

        Raises:
            RefitError: memory of one of the ranks cannot be shared; raised on every rank.
        """
        settle(next(iter(self._parameters.values())))
        try:
            own: Any = self._describe()
        except RefitError as error:
            own = str(error)
        found = self._all_gather(own)
        refused = next((one for one in found if isinstance(one, str)), None)
        if refused is not None:
            raise RefitError(refused)
        return json.dumps(dict(zip(self._ranks, found, strict=True))).encode()

    def end(self, error: RefitError | None) -> None:
        """Return when the consumers of all ranks are done; collective. `error`: how this rank's refit failed.

        Raises:
            RefitError: that error.
            LostTouchError: another rank's refit has failed.
        """
        failed = self._all_gather(error is not None)
        if error is not None:
            raise error
        if any(failed):
            raise LostTouchError(f"the refit failed on policy rank {self._ranks[failed.index(True)]}")

    def on_one_machine(self) -> bool:
        """Whether all ranks are on one machine; collective."""
        return len(set(self._all_gather(_machine()))) == 1

    def can_be_opened(self) -> bool:
        """Whether the ranks can open one another's memory, as their consumers will; collective."""
        try:
            addresses = self.addresses()
        except RefitError:
            return False
        try:
            with opened(addresses, self._memory, self._others(addresses)):
                reached = True
        except RefitError:
            reached = False
        return all(self._all_gather(reached))

    @contextmanager
    def together(self) -> Iterator[Parameters]:
        """The parameters of all ranks, until the block ends; collective."""
        addresses = self.addresses()
        own = {(self._rank, number): parameter for number, parameter in self._parameters.items()}
        with opened(addresses, self._memory, self._others(addresses)) as others:
            yield own | dict(others)
            # No rank's memory may move while another rank reads it.
            self._all_gather(None)

    def _others(self, addresses: bytes) -> set[Key]:
        return {key for key, _ in _entries(addresses) if key[0] != self._rank}

    def _describe(self) -> dict[str, Any]:
        begins, places = dict[int, int](), dict[int, tuple[int, int, int]]()
        for number, parameter in self._parameters.items():
            begin = self._memory.allocation(parameter)
            index = begins.setdefault(begin, len(begins))
            places[number] = index, parameter.data_ptr() - begin, parameter.numel() * parameter.element_size()
        return {"handles": [self._memory.handle(begin).hex() for begin in begins], "parameters": places}

    def _all_gather(self, own: Any) -> list[Any]:
        return [own] if self._group is None else all_gather(own, self._group)


def probe_sharing(
    parameters: Mapping[int, Tensor], recipe: Recipe, groups: Sequence[dist.ProcessGroup], timeout_s: float
) -> tuple[Sharing, bool, bool]:
    """How this rank shares its `parameters` with the ranks that need them, whether these are on one machine, and
    whether they can open one another's memory; collective over the default group, and the last two are the same on all
    ranks. `groups`: existing process groups."""
    ranks, group = group_by_need(source_ranks(recipe), groups, timeout_s)
    sharing = Sharing(parameters, dist.get_rank(), ranks, group)
    if not all(all_gather(sharing.on_one_machine())):
        log.info("refits go through a buffer: the policy's weights are spread over several machines")
        return sharing, False, False
    if not all(all_gather(sharing.can_be_opened())):
        if dist.get_rank() == 0:
            log.warning("engines cannot open the policy's memory here: refits go through a buffer (refit.direct)")
        return sharing, True, False
    return sharing, True, True


@contextmanager
def opened(addresses: bytes, memory: Memory, wanted: Collection[Key] | None = None) -> Iterator[Parameters]:
    """The parameters at `Sharing.addresses`, those `wanted` or all, until the block ends.

    Raises:
        RefitError: memory that cannot be opened from here.
    """
    entries = [(key, place) for key, place in _entries(addresses) if wanted is None or key in wanted]
    with memory.opened(dict.fromkeys(handle for _, (handle, _, _) in entries)) as begins:
        yield {key: memory.tensor_at(begins[handle] + offset, size) for key, (handle, offset, size) in entries}


def _entries(addresses: bytes) -> Iterator[tuple[Key, tuple[bytes, int, int]]]:
    """For each parameter its allocation's handle, and its begin and size in that allocation in bytes."""
    for rank, shared in json.loads(addresses).items():
        handles = [bytes.fromhex(handle) for handle in shared["handles"]]
        for number, (index, offset, size) in shared["parameters"].items():
            yield (int(rank), int(number)), (handles[index], offset, size)


def _machine() -> str:
    """What processes under one kernel, which can share memory, have in common."""
    return _BOOT.read_text() if _BOOT.exists() else socket.gethostname()
