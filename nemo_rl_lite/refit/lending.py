"""Parameters that policy ranks lend, at each refit, to whoever copies them: where they are, and how they are opened.

A rank's weights may be spread over several ranks of its machine. Those lend together: what one of them tells its
consumers is where the parameters of all of them are, and none takes its own away before the consumers of all are done.
"""

import json
import logging
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.errors import LostTouchError, RefitError
from nemo_rl_lite.refit import device_memory
from nemo_rl_lite.refit.linking import everyones, linked_group
from nemo_rl_lite.refit.routes import Recipe

log = logging.getLogger(__name__)

Key = tuple[int, int]
"""A policy rank, and the number of one of its parameters."""
Parameters = Mapping[Key, Tensor]
"""Each as uint8 [bytes] where it is another process's, contiguous."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Memory(Protocol):
    """How processes share devices' memory: `device_memory` on GPUs."""

    def allocation(self, tensor: Tensor) -> int: ...

    def handle(self, address: int) -> bytes: ...

    def opened(self, handles: Iterable[bytes]) -> AbstractContextManager[dict[bytes, int]]: ...

    def tensor_at(self, address: int, nbytes: int) -> Tensor: ...


def find_lending(
    parameters: Mapping[int, Tensor], recipe: Recipe, groups: Sequence[dist.ProcessGroup], timeout_s: float
) -> "Lending | None":
    """How this rank lends its `parameters` to those that want weights by this `recipe`, and by those of other ranks;
    None, on all ranks, where one cannot. Collective over the default group. `groups`: there already."""
    needed = {box.piece.rank for boxes in recipe.values() for box in boxes}
    ranks, group = linked_group(needed, groups, timeout_s)
    lending = Lending(parameters, dist.get_rank(), ranks, group)
    if not all(everyones(lending.on_one_machine())):
        log.info("refits go through a buffer: the policy's weights are spread over several machines")
        return None
    if not all(everyones(lending.can_be_opened())):
        if dist.get_rank() == 0:
            log.warning("engines cannot open the policy's memory here: refits go through a buffer (refit.direct)")
        return None
    return lending


class Lending:
    """One policy rank's part. What is said to be collective is called by all ranks of the group."""

    def __init__(
        self,
        parameters: Mapping[int, Tensor],
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        memory: Memory = device_memory,
    ):
        """`parameters`: this rank's by number, contiguous; they may move between refits. `ranks`: those that lend
        together, this one among them; `group`: theirs, None where this one is alone."""
        self._parameters, self._rank, self._ranks, self._group = parameters, rank, ranks, group
        self._memory = memory

    def where(self) -> bytes:
        """Where the parameters of all ranks are now, with all done that their devices were asked for; collective.

        Raises:
            RefitError: memory of one of the ranks cannot be shared; on every rank.
        """
        settle(next(iter(self._parameters.values())))
        try:
            own: Any = self._describe()
        except RefitError as error:
            own = str(error)
        found = self._everyones(own)
        refused = next((one for one in found if isinstance(one, str)), None)
        if refused is not None:
            raise RefitError(refused)
        return json.dumps(dict(zip(self._ranks, found, strict=True))).encode()

    def end(self, error: RefitError | None) -> None:
        """Return when the consumers of all ranks are done; collective. `error`: what this rank's own ended with.

        Raises:
            RefitError: that error.
            LostTouchError: another rank's refit has failed.
        """
        failed = self._everyones(error is not None)
        if error is not None:
            raise error
        if any(failed):
            raise LostTouchError(f"the refit failed on policy rank {self._ranks[failed.index(True)]}")

    def on_one_machine(self) -> bool:
        """Collective."""
        return len(set(self._everyones(_machine()))) == 1

    def can_be_opened(self) -> bool:
        """Whether the ranks can open one another's memory, which is what their consumers will do; collective."""
        try:
            where = self.where()
        except RefitError:
            return False
        try:
            with opened(where, self._memory, self._others(where)):
                reached = True
        except RefitError:
            reached = False
        return all(self._everyones(reached))

    @contextmanager
    def together(self) -> Iterator[Parameters]:
        """The parameters of all ranks, until the block ends; collective."""
        where = self.where()
        own = {(self._rank, number): parameter for number, parameter in self._parameters.items()}
        with opened(where, self._memory, self._others(where)) as others:
            yield own | dict(others)
            # Nobody's memory goes while another may be reading it.
            self._everyones(None)

    def _others(self, where: bytes) -> set[Key]:
        return {key for key, _ in _entries(where) if key[0] != self._rank}

    def _describe(self) -> dict[str, Any]:
        begins, places = dict[int, int](), dict[int, tuple[int, int, int]]()
        for number, parameter in self._parameters.items():
            begin = self._memory.allocation(parameter)
            index = begins.setdefault(begin, len(begins))
            places[number] = index, parameter.data_ptr() - begin, parameter.numel() * parameter.element_size()
        return {"handles": [self._memory.handle(begin).hex() for begin in begins], "parameters": places}

    def _everyones(self, own: Any) -> list[Any]:
        return [own] if self._group is None else everyones(own, self._group)


@contextmanager
def opened(where: bytes, memory: Memory, wanted: Collection[Key] | None = None) -> Iterator[Parameters]:
    """Parameters at the places of `Lending.where`, those `wanted` or all, until the block ends.

    Raises:
        RefitError: memory that cannot be opened from here.
    """
    entries = [(key, place) for key, place in _entries(where) if wanted is None or key in wanted]
    with memory.opened(dict.fromkeys(handle for _, (handle, _, _) in entries)) as addresses:
        yield {key: memory.tensor_at(addresses[handle] + offset, size) for key, (handle, offset, size) in entries}


def _entries(where: bytes) -> Iterator[tuple[Key, tuple[bytes, int, int]]]:
    """Of each parameter its allocation's handle, and its begin and size there in bytes."""
    for rank, told in json.loads(where).items():
        handles = [bytes.fromhex(handle) for handle in told["handles"]]
        for number, (index, offset, size) in told["parameters"].items():
            yield (int(rank), int(number)), (handles[index], offset, size)


def _machine() -> str:
    """Whatever runs under one kernel can share memory, if it may."""
    return _BOOT.read_text() if _BOOT.exists() else socket.gethostname()


def settle(tensor: Tensor) -> None:
    """Wait until the tensor's device has done what was asked of it; another process does not see our streams."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
