"""Direct refits: consumers copy the policy's parameters; frozen weights exist once per device.

At each refit the producer sends the current addresses of its parameters and waits. The consumer opens that memory,
copies, and closes it. The first refit fills buckets for the engine's loader. If the loader only copies windows of
tensors, later refits copy directly to the engine's weights. A tensor-parallel consumer reads only its part, from any
GPU of the machine. Ranks with sharded weights share as a group: each sends the addresses of all, and no rank moves its
parameters before all consumers are done.

A policy rank can use an engine's frozen weights and free its own. Equal weights are found by comparing bytes,
regardless of names and fusion. A frozen parameter becomes a view of the first rows of an engine's weight, because
padding is at the end. Neither side writes to shared memory, and the engine's weights never move, because CUDA graphs
use their addresses.
"""

import json
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.errors import LostTouchError, RefitError
from nemo_rl_lite.refit import device_memory
from nemo_rl_lite.refit.copy_table import CopyTable
from nemo_rl_lite.refit.group import RefitGroup, all_gather, group_by_need
from nemo_rl_lite.refit.interface import Checksums, Loader, RefitReport, Verify, sampled, synchronize
from nemo_rl_lite.refit.layout import ReceivedBucket, RefitPlan, dtype_name, new_buffers, same_bytes, view
from nemo_rl_lite.refit.trace import Recipe, Segment, segments_of_window, source_ranks

log = logging.getLogger(__name__)
Key = tuple[int, int]
"""Policy rank, and the number of one of its parameters."""

Parameters = Mapping[Key, Tensor]
"""Contiguous tensors; uint8 [bytes] for another process's."""

Places = Mapping[Key, tuple[int, int]]
"""Addresses of parameters in this process, and their bytes."""

# Elements per comparison.
_COMPARED = 1 << 24

# Identifies a kernel, whose processes can share memory.
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Memory(Protocol):
    """Shares device memory between processes; on GPUs, the module `device_memory`."""

    def allocation(self, address: int) -> tuple[int, int]: ...

    def handle(self, address: int) -> bytes: ...

    def opened(self, handles: Iterable[bytes]) -> AbstractContextManager[dict[bytes, int]]: ...

    def tensor_at(self, address: int, nbytes: int) -> Tensor: ...


class IpcExport:
    """Parameters that one policy rank shares. Public methods are collective over the group."""

    def __init__(
        self,
        parameters: Mapping[int, Tensor],
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        memory: Memory = device_memory,
    ):
        """`parameters`: this rank's, contiguous, by number; they may move between refits. `ranks`: of the `group`,
        which is None for a single rank."""
        self._parameters, self._rank, self._ranks, self._group = parameters, rank, ranks, group
        self._memory = memory

    def addresses(self) -> bytes:
        """Return the addresses of all ranks' parameters, after all devices are done with them. Raises RefitError, on
        every rank: a rank's memory cannot be shared."""
        synchronize(next(iter(self._parameters.values())))
        try:
            own: Any = self._describe()
        except RefitError as error:
            own = str(error)
        found = self._all_gather(own)
        failure = next((one for one in found if isinstance(one, str)), None)
        if failure is not None:
            raise RefitError(failure)
        return json.dumps(dict(zip(self._ranks, found, strict=True))).encode()

    def end(self, error: RefitError | None) -> None:
        """Wait for the consumers of all ranks, and raise this rank's `error`, if any. Raises LostTouchError: another
        rank's refit failed."""
        failed = self._all_gather(error is not None)
        if error is not None:
            raise error
        if any(failed):
            raise LostTouchError(f"the refit failed on policy rank {self._ranks[failed.index(True)]}")

    def on_one_machine(self) -> bool:
        """Return whether all ranks are on one machine."""
        return len(set(self._all_gather(_BOOT.read_text() if _BOOT.exists() else socket.gethostname()))) == 1

    def can_be_opened(self) -> bool:
        """Return whether the ranks can open one another's memory, as their consumers will."""
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
        """Yield the parameters of all ranks."""
        addresses = self.addresses()
        own = {(self._rank, number): parameter for number, parameter in self._parameters.items()}
        with opened(addresses, self._memory, self._others(addresses)) as others:
            yield own | dict(others)
            # Memory must not move while another rank reads it.
            self._all_gather(None)

    def _others(self, addresses: bytes) -> set[Key]:
        return {key for key, _ in _entries(addresses) if key[0] != self._rank}

    def _describe(self) -> dict[str, Any]:
        begins, places, begin, size = dict[int, int](), dict[int, tuple[int, int, int]](), 0, 0
        for number, parameter in self._parameters.items():
            address = parameter.data_ptr()
            if not begin <= address < begin + size:
                begin, size = self._memory.allocation(address)
            places[number] = begins.setdefault(begin, len(begins)), address - begin, parameter.nbytes
        return {"handles": [self._memory.handle(begin).hex() for begin in begins], "parameters": places}

    def _all_gather(self, own: Any) -> list[Any]:
        return [own] if self._group is None else all_gather(own, self._group)


def probe_sharing(
    parameters: Mapping[int, Tensor], recipe: Recipe, groups: Sequence[dist.ProcessGroup], timeout_s: float
) -> IpcExport | None:
    """Share this rank's `parameters` with the ranks that read them; returns None on all ranks if any cannot open
    another's memory. Collective over the default group. `groups`: existing process groups to reuse."""
    ranks, group = group_by_need(source_ranks(recipe), groups, timeout_s)
    sharing = IpcExport(parameters, dist.get_rank(), ranks, group)
    if not all(all_gather(sharing.on_one_machine())):
        log.info("refits use a buffer: the policy's weights are sharded over several machines")
        return None
    if not all(all_gather(sharing.can_be_opened())):
        if dist.get_rank() == 0:
            log.warning("refits use a buffer, because engines cannot open the policy's memory here (refit.cuda_ipc)")
        return None
    return sharing


@contextmanager
def opened(addresses: bytes, memory: Memory, wanted: Collection[Key] | None = None) -> Iterator[Parameters]:
    """Open the parameters at `IpcExport.addresses` (`wanted`: a subset) within the block. Raises RefitError: their
    memory cannot be opened from here."""
    with _places(addresses, memory, wanted) as places:
        yield {key: memory.tensor_at(*place) for key, place in places.items()}


@contextmanager
def _places(addresses: bytes, memory: Memory, wanted: Collection[Key] | None) -> Iterator[Places]:
    """Open parameters as `opened`; yield their addresses in this process and their bytes."""
    entries = [(key, place) for key, place in _entries(addresses) if wanted is None or key in wanted]
    with memory.opened(dict.fromkeys(handle for _, (handle, _, _) in entries)) as begins:
        yield {key: (begins[handle] + offset, size) for key, (handle, offset, size) in entries}


def _entries(addresses: bytes) -> Iterator[tuple[Key, tuple[bytes, int, int]]]:
    """Yield each parameter's allocation handle, and its offset and size there in bytes."""
    for rank, shared in json.loads(addresses).items():
        handles = [bytes.fromhex(handle) for handle in shared["handles"]]
        for number, (index, offset, size) in shared["parameters"].items():
            yield (int(rank), int(number)), (handles[index], offset, size)


Copy = tuple[str, Segment, Tensor]
"""Tensor name, the segment with the copy's source, and the copy's target."""


@dataclass(frozen=True)
class DirectOffer:
    """`WeightSource` of the parameters themselves. `recipe`: their windows that fill each tensor."""

    recipe: Recipe

    def group_device(self, device: torch.device) -> torch.device:
        # The group sends only small messages.
        return torch.device("cpu")

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> "DirectReceiver":
        return DirectReceiver(plan, group, self.recipe, device, verify)


class DirectSender:
    """`Sender` whose consumers copy the parameters during `send`."""

    def __init__(self, plan: RefitPlan, group: RefitGroup, sharing: IpcExport):
        self._plan, self._group, self._sharing = plan, group, sharing

    def send(self) -> RefitReport:
        """See `Sender.send`. Returns when the consumers of all ranks in the group are done. Stages: `pack` (finding the
        addresses of all ranks), `transfer` (waiting for consumers)."""
        report, clock, error = RefitReport(), time.perf_counter(), None
        addresses = self._sharing.addresses()
        try:
            self._group.announce(self._plan.digest)
            self._group.send_message(addresses)
            clock = report.add("pack", clock)
            self._group.barrier("the end of the refit")
        except RefitError as raised:
            error = raised
        self._sharing.end(error)
        report.add("transfer", clock)
        return report


class DirectReceiver:
    """`Receiver` that copies parameters, through buckets until it knows each window's target."""

    def __init__(
        self,
        plan: RefitPlan,
        group: RefitGroup,
        recipe: Recipe,
        device: torch.device,
        verify: Verify,
        memory: Memory = device_memory,
    ):
        self._plan, self._group, self._recipe, self._device = plan, group, recipe, device
        self._verify, self._memory = verify, memory
        # None for refits through buckets.
        self._direct: _Copies | None = None
        self._is_first = True

    def receive(self, loader: Loader) -> RefitReport:
        """See `Receiver.receive`. Also raises RefitError: memory cannot be opened, or a copied weight differs."""
        clock, direct = time.perf_counter(), self._direct
        report = RefitReport(nbytes=self._plan.nbytes if direct is None else direct.nbytes)
        self._group.expect(self._plan.digest)
        addresses = self._group.receive_message()
        report.add("transfer", clock)
        with _places(addresses, self._memory, None if direct is None else direct.keys) as places:
            try:
                if direct is None:
                    self._load(loader, places)
                else:
                    direct.run(places)
            finally:
                synchronize(torch.empty(0, device=self._device))
        self._group.barrier("the end of the refit")
        if direct is None and self._device.type == "cuda":
            # Free the memory of buckets for the policy and the KV cache.
            torch.cuda.empty_cache()
        return report

    def _load(self, loader: Loader, places: Places) -> None:
        """Load through buckets; the first time, decide whether later refits can copy directly."""
        buffer = new_buffers(self._plan, 1, self._device)[0]
        for index, bucket in enumerate(self._plan.buckets):
            copies = [
                (slot.name, segment, segment.target.of(view(buffer, slot)))
                for slot in bucket.slots
                for segment in self._recipe[slot.name]
            ]
            _Copies(copies, self._verify).run(places)
            loader.fill(ReceivedBucket(index, bucket, buffer[: bucket.nbytes]))
        loader.forget_buffers()
        if self._is_first:
            self._is_first = False
            self._direct = self._find_copies(loader, places)

    def _find_copies(self, loader: Loader, places: Places) -> "_Copies | None":
        """Return a copy for each window of a parameter; None if copies do not reproduce the loader's result."""
        windows, copies, reason = loader.windows(), list[Copy](), None
        if windows is None:
            reason = "the engine's loader does more than copy parts of tensors"
        for name, elements, window, target in windows or ():
            segments = segments_of_window(self._recipe[name], elements, window)
            if segments is None:
                reason = f"the engine's part of {name} is too irregular"
                break
            copies += [(name, segment, segment.target.of(target)) for segment in segments]
        if reason is None and (differing := _Copies(copies, "full").first_differing(places)) is not None:
            reason = f"the engine changed {differing} when it was loaded"
        if reason is not None:
            log.info("every refit goes through buckets: %s", reason)
            return None
        log.info("later refits: %d copies out of the policy's parameters", len(copies))
        return _Copies(copies, self._verify)


class _Copies:
    """Verified copies from parameters, whose addresses may change between refits."""

    def __init__(self, copies: Sequence[Copy], verify: Verify):
        found = dict.fromkeys((segment.rank, segment.parameter) for _, segment, _ in copies)
        self.keys = {key: number for number, key in enumerate(found)}
        """Numbers of the parameters that the copies read."""
        self.nbytes = sum(target.nbytes for _, _, target in copies)

        def table(some: Sequence[Copy]) -> CopyTable:
            return CopyTable([(self.keys[one.rank, one.parameter], one.source, target) for _, one, target in some])

        verified = sampled(verify, copies)
        self._names = [name for name, _, _ in verified]
        self._copied = table(copies)
        self._verified = self._copied if len(verified) == len(copies) else table(verified)

    def run(self, places: Places) -> None:
        """Copy. Raises RefitError: a weight differs afterwards."""
        self._copied.run(self._bases(places))
        differing = self.first_differing(places)
        if differing is not None:
            raise RefitError(f"the engine's {differing} differs from the policy's after the copy")

    def first_differing(self, places: Places) -> str | None:
        """Return the first verified tensor with a window that is not bitwise identical to the parameter's."""
        differing = self._verified.first_differing(self._bases(places))
        return None if differing is None else self._names[differing]

    def _bases(self, places: Places) -> np.ndarray:
        return np.array([places[key][0] for key in self.keys], dtype=np.int64)


def _slabs(tensor: Tensor) -> Sequence[Tensor]:
    """Split the tensor to limit the memory of comparisons."""
    whole = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    return whole.split(max(1, _COMPARED * whole.shape[0] // max(1, whole.numel())))


# Number of first elements by which candidates for equal weights are found.
_HEAD = 64
# Word size of checksums, in bytes.
_WORD = 8
_Head = tuple[torch.dtype, tuple[int, ...], bytes]


@dataclass(frozen=True)
class SharedWeights:
    """Weights of one engine rank: addresses, and dtype and shape of each. It is pickled."""

    addresses: bytes
    weights: Sequence[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class SharedBytes:
    """Bytes of a policy rank's frozen weights."""

    shared: int
    """Only in an engine's memory."""
    twice: int
    """On both sides."""


def share_weights(weights: Iterable[Tensor], memory: Memory = device_memory) -> SharedWeights:
    """Share an engine's weights, which must not be written, moved or freed afterwards. Raises RefitError: the memory
    cannot be shared."""
    shared = [weight.detach() for weight in weights if weight.dim() and weight.numel() and weight.is_contiguous()]
    with _naming_the_key():
        addresses = IpcExport(dict(enumerate(shared)), 0, [0], None, memory).addresses()
    return SharedWeights(addresses, [(dtype_name(weight.dtype), tuple(weight.shape)) for weight in shared])


class SharedFrozenParams:
    """Parameters of a policy rank in an engine's memory, from `take` until `close`."""

    def __init__(self, memory: Memory = device_memory):
        self._memory, self._open = memory, ExitStack()
        self._parameters: dict[int, Tensor] = {}
        self._checksums: list[int] = []

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._parameters

    @torch.no_grad()
    def take(self, weights: SharedWeights, parameters: Iterable[Tensor]) -> SharedBytes:
        """Replace the memory of frozen `parameters` with engine weights of the same bytes. Raises RefitError: the
        engine's memory cannot be opened from here."""
        frozen = [one for one in parameters if not one.requires_grad and one.dim() and one.numel()]
        with _naming_the_key():
            begins = self._open.enter_context(opened(weights.addresses, self._memory))
        of_engine = [
            begins[0, number].view(getattr(torch, dtype)).view(shape)
            for number, (dtype, shape) in enumerate(weights.weights)
        ]
        for parameter, same in _equal(frozen, of_engine):
            parameter.data = same
            self._parameters[id(parameter)] = parameter
        self._checksums = self._summed()
        shared = sum(one.nbytes for one in self._parameters.values())
        return SharedBytes(shared, sum(one.nbytes for one in frozen) - shared)

    def check(self) -> None:
        """Raise RefitError if the shared memory has changed, as after the engine's end."""
        if self._summed() != self._checksums:
            raise RefitError("weights that an engine shares with the policy have changed: its process may be gone")

    def close(self) -> None:
        """Close the engine's memory. The parameters must not be used afterwards."""
        self._parameters.clear()
        self._open.close()

    def _summed(self) -> list[int]:
        sums = Checksums("full")
        for parameter in self._parameters.values():
            sums.add(parameter.detach().view(-1).view(torch.uint8))
        return sums.values()


@contextmanager
def _naming_the_key() -> Iterator[None]:
    try:
        yield
    except RefitError as error:
        raise RefitError(f"{error}; refit.cuda_ipc=false keeps a copy of the frozen weights on each side") from error


def _equal(parameters: Iterable[Tensor], of_engine: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parameters for which an engine's weight begins with the same bytes, each with those rows."""
    candidates = defaultdict[_Head, list[Tensor]](list)
    for weight in of_engine:
        candidates[_head(weight)].append(weight)
    for parameter in parameters:
        own = parameter.detach()
        if own.nbytes % _WORD or not own.is_contiguous():
            continue
        of_this_size = (one[: len(own)] for one in candidates[_head(own)] if len(one) >= len(own))
        same = next((one for one in of_this_size if all(map(same_bytes, _slabs(own), _slabs(one)))), None)
        if same is not None:
            yield parameter, same


def _head(weight: Tensor) -> _Head:
    first = weight[0].reshape(-1)[:_HEAD].contiguous().cpu()
    return weight.dtype, tuple(weight.shape[1:]), bytes(first.view(-1).view(torch.uint8).tolist())
