"""Direct refits: consumers copy weights out of the policy's parameters, and frozen weights exist once per device.

The producer says at each refit where its parameters are, which may have moved, and waits. The consumer opens that
memory, copies, and closes it. At the first refit it fills buckets in its own memory, for the engine's loader. If the
loader only copies windows of tensors, later refits copy straight to the engine's weights: a tensor-parallel consumer
reads only what it needs, from whichever GPU of the machine has it. Ranks whose weights are spread over several ranks
share together: each tells its consumers where the parameters of all are, and none moves its own before all consumers
are done.

With frozen weights, the engine shares its memory and the policy rank on its device frees its own copy. Equal weights
are found by comparing bytes, so names and fusions do not matter: a frozen parameter becomes a view of the first rows
of an engine's weight (padded vocabularies end with the padding). Neither side writes to shared memory, and the
engine's weights never move, because its CUDA graphs know their addresses.
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

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.errors import LostTouchError, RefitError
from nemo_rl_lite.refit import device_memory
from nemo_rl_lite.refit.group import RefitGroup, all_gather, group_by_need
from nemo_rl_lite.refit.interface import Checksums, Loader, RefitReport, Verify, sampled, synchronize
from nemo_rl_lite.refit.layout import CopyList, ReceivedBucket, RefitPlan, dtype_name, new_buffers, same_bytes, view
from nemo_rl_lite.refit.trace import Recipe, Segment, segments_of_window, source_ranks

log = logging.getLogger(__name__)
Key = tuple[int, int]
"""A policy rank, and the number of one of its parameters."""

Parameters = Mapping[Key, Tensor]
"""Contiguous; as uint8 [bytes] if it is another process's."""

# Elements compared at a time.
_COMPARED = 1 << 24

# The same on all processes of one kernel, which can share memory.
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Memory(Protocol):
    """Shares a device's memory between processes: the module `device_memory` on GPUs."""

    def allocation(self, tensor: Tensor) -> int: ...

    def handle(self, address: int) -> bytes: ...

    def opened(self, handles: Iterable[bytes]) -> AbstractContextManager[dict[bytes, int]]: ...

    def tensor_at(self, address: int, nbytes: int) -> Tensor: ...


class IpcExport:
    """The parameters that one policy rank shares. All ranks of the group call its collective methods."""

    def __init__(
        self,
        parameters: Mapping[int, Tensor],
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        memory: Memory = device_memory,
    ):
        """`parameters`: this rank's by number, contiguous; they may move between refits. `ranks`: those that share
        together, this one included. `group`: theirs, None for a single rank."""
        self._parameters, self._rank, self._ranks, self._group = parameters, rank, ranks, group
        self._memory = memory

    def addresses(self) -> bytes:
        """Return where the parameters of all ranks are, once all devices are done with them; collective.

        Raises:
            RefitError: memory of one of the ranks cannot be shared; raised on every rank.
        """
        synchronize(next(iter(self._parameters.values())))
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
        """Return whether all ranks are on one machine; collective."""
        return len(set(self._all_gather(_BOOT.read_text() if _BOOT.exists() else socket.gethostname()))) == 1

    def can_be_opened(self) -> bool:
        """Return whether the ranks can open one another's memory, as their consumers will; collective."""
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
        """Yield the parameters of all ranks; collective."""
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
) -> IpcExport | None:
    """Share this rank's `parameters` with the ranks that need them; None on all ranks if any of them cannot open
    another's memory. Collective over the default group. `groups`: existing process groups."""
    ranks, group = group_by_need(source_ranks(recipe), groups, timeout_s)
    sharing = IpcExport(parameters, dist.get_rank(), ranks, group)
    if not all(all_gather(sharing.on_one_machine())):
        log.info("refits go through a buffer: the policy's weights are spread over several machines")
        return None
    if not all(all_gather(sharing.can_be_opened())):
        if dist.get_rank() == 0:
            log.warning("engines cannot open the policy's memory here: refits go through a buffer (refit.cuda_ipc)")
        return None
    return sharing


@contextmanager
def opened(addresses: bytes, memory: Memory, wanted: Collection[Key] | None = None) -> Iterator[Parameters]:
    """Open the parameters at `IpcExport.addresses`, those `wanted` or all, until the block ends.

    Raises:
        RefitError: memory that cannot be opened from here.
    """
    entries = [(key, place) for key, place in _entries(addresses) if wanted is None or key in wanted]
    with memory.opened(dict.fromkeys(handle for _, (handle, _, _) in entries)) as begins:
        yield {key: memory.tensor_at(begins[handle] + offset, size) for key, (handle, offset, size) in entries}


def _entries(addresses: bytes) -> Iterator[tuple[Key, tuple[bytes, int, int]]]:
    """Yield for each parameter its allocation's handle, and its begin and size there in bytes."""
    for rank, shared in json.loads(addresses).items():
        handles = [bytes.fromhex(handle) for handle in shared["handles"]]
        for number, (index, offset, size) in shared["parameters"].items():
            yield (int(rank), int(number)), (handles[index], offset, size)


Copy = tuple[str, Segment, Tensor]
"""A tensor's name, the segment whose source is copied, and the memory that it is copied to."""


@dataclass(frozen=True)
class DirectOffer:
    """A `WeightSource` of the parameters themselves. `recipe`: the windows of them that fill each tensor."""

    recipe: Recipe

    def group_device(self, device: torch.device) -> torch.device:
        # Only small messages travel.
        return torch.device("cpu")

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> "DirectReceiver":
        return DirectReceiver(plan, group, self.recipe, device, verify)


class DirectSender:
    """The `Sender` whose consumers copy the parameters as they are when `send` is called."""

    def __init__(self, plan: RefitPlan, group: RefitGroup, sharing: IpcExport):
        self._plan, self._group, self._sharing = plan, group, sharing

    def send(self) -> RefitReport:
        """See `Sender.send`. Returns when the consumers of all ranks that share together are done.

        Stages timed: `pack` (finding the memory of all ranks), `transfer` (waiting for consumers).
        """
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
    """The `Receiver` that copies parameters, through buckets until it knows where each window of them goes."""

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
        # None while refits go through buckets, which need all parameters.
        self._copies: list[Copy] | None = None
        self._needed: set[Key] | None = None
        self._is_first = True
        # The parameters' addresses, and the copies for them.
        self._ready: tuple[list[int], CopyList] | None = None

    def receive(self, loader: Loader) -> RefitReport:
        """See `Receiver.receive`. Also raises RefitError if memory cannot be opened, or if a copied weight differs from
        the producer's."""
        report, clock = RefitReport(), time.perf_counter()
        through_buckets = self._copies is None
        self._group.expect(self._plan.digest)
        addresses = self._group.receive_message()
        report.add("transfer", clock)
        with opened(addresses, self._memory, self._needed) as parameters:
            try:
                if self._copies is None:
                    self._load(loader, parameters)
                else:
                    self._copy(self._copies, parameters)
            finally:
                synchronize(torch.empty(0, device=self._device))
        self._group.barrier("the end of the refit")
        if through_buckets and self._device.type == "cuda":
            # The policy or the cache may want the memory of buckets and trials.
            torch.cuda.empty_cache()
        return report

    def _load(self, loader: Loader, parameters: Parameters) -> None:
        """Load through buckets; the first time, find out whether later refits can copy instead."""
        buffer = new_buffers(self._plan, 1, self._device)[0]
        for index, bucket in enumerate(self._plan.buckets):
            copies = [
                (slot.name, segment, segment.target.of(view(buffer, slot)))
                for slot in bucket.slots
                for segment in self._recipe[slot.name]
            ]
            self._run(_copy_list(copies, parameters), copies, parameters)
            loader.fill(ReceivedBucket(index, bucket, buffer[: bucket.nbytes]))
        loader.forget_buffers()
        if self._is_first:
            self._is_first = False
            self._copies = self._find_copies(loader, parameters)
            if self._copies is not None:
                self._needed = {_key(segment) for _, segment, _ in self._copies}

    def _find_copies(self, loader: Loader, parameters: Parameters) -> list[Copy] | None:
        """Return where each window of a parameter goes; None if copying does not give what the loader has just put
        there."""
        windows, copies = loader.windows(), list[Copy]()
        if windows is None:
            log.info("every refit goes through buckets: the engine's loader does more than copy parts of tensors")
            return None
        for name, elements, window, target in windows:
            segments = segments_of_window(self._recipe[name], elements, window)
            if segments is None:
                log.info("every refit goes through buckets: the engine takes too irregular a part of %s", name)
                return None
            copies += [(name, segment, segment.target.of(target)) for segment in segments]
        differing = _differing(copies, parameters)
        if differing is not None:
            log.info("every refit goes through buckets: the engine changed %s when it was loaded", differing)
            return None
        log.info("later refits: %d copies out of the policy's parameters", len(copies))
        return copies

    def _copy(self, copies: Sequence[Copy], parameters: Parameters) -> None:
        addresses = [parameter.data_ptr() for parameter in parameters.values()]
        if self._ready is None or self._ready[0] != addresses:
            self._ready = addresses, _copy_list(copies, parameters)
        self._run(self._ready[1], copies, parameters)

    def _run(self, copy_list: CopyList, copies: Sequence[Copy], parameters: Parameters) -> None:
        copy_list.run()
        differing = _differing(sampled(self._verify, copies), parameters)
        if differing is not None:
            raise RefitError(f"the engine's {differing} is not the policy's after it was copied")


def _copy_list(copies: Sequence[Copy], parameters: Parameters) -> CopyList:
    sources = [_source(segment, parameters, target.dtype) for _, segment, target in copies]
    return CopyList([target for _, _, target in copies], sources)


def _key(segment: Segment) -> Key:
    return segment.rank, segment.parameter


def _source(segment: Segment, parameters: Parameters, dtype: torch.dtype) -> Tensor:
    return segment.source.of(parameters[_key(segment)].view(dtype))


def _differing(copies: Iterable[Copy], parameters: Parameters) -> str | None:
    """Return the first tensor of which a copied window differs from the parameter, to the bit."""
    names, equal = list[str](), list[Tensor]()
    for name, segment, target in copies:
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.element_size()]
        source = _source(segment, parameters, target.dtype)
        for ours, theirs in zip(_slabs(target.view(bits)), _slabs(source.view(bits)), strict=True):
            names.append(name)
            equal.append((ours == theirs).all())
    # All results are read at once, because each reading waits for the device.
    return names[torch.stack(equal).tolist().index(False)] if equal and not torch.stack(equal).all() else None


def _slabs(tensor: Tensor) -> Sequence[Tensor]:
    """Split the tensor, so that comparing it takes little additional memory."""
    whole = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    return whole.split(max(1, _COMPARED * whole.shape[0] // max(1, whole.numel())))


# Weights are candidates for each other by their first elements.
_HEAD = 64
# Checksums are of words.
_WORD = 8
_Head = tuple[torch.dtype, tuple[int, ...], bytes]


@dataclass(frozen=True)
class SharedWeights:
    """The weights of one engine rank: where they are, and each one's dtype and shape. It is pickled."""

    addresses: bytes
    weights: Sequence[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class SharedBytes:
    """Bytes of a policy rank's frozen weights that are an engine's, and that both sides hold."""

    shared: int
    twice: int


def share_weights(weights: Iterable[Tensor], memory: Memory = device_memory) -> SharedWeights:
    """Share an engine's weights, which must not be written, moved or freed from now on.

    Raises:
        RefitError: the memory cannot be shared.
    """
    shared = [weight.detach() for weight in weights if weight.dim() and weight.numel() and weight.is_contiguous()]
    with _naming_the_key():
        addresses = IpcExport(dict(enumerate(shared)), 0, [0], None, memory).addresses()
    return SharedWeights(addresses, [(dtype_name(weight.dtype), tuple(weight.shape)) for weight in shared])


class SharedFrozenParams:
    """The parameters of a policy rank whose memory is an engine's, from `take` until this process ends."""

    def __init__(self, memory: Memory = device_memory):
        self._memory, self._open = memory, ExitStack()
        self._parameters: dict[int, Tensor] = {}
        self._checksums: list[int] = []

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._parameters

    @torch.no_grad()
    def take(self, weights: SharedWeights, parameters: Iterable[Tensor]) -> SharedBytes:
        """Make the frozen `parameters` the engine's memory, where it has the same bytes. Their own memory is freed
        where nothing else refers to it.

        Raises:
            RefitError: the engine's memory cannot be opened from here.
        """
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
        """Check that the shared memory is unchanged. Raises RefitError: it is not, e.g. after the engine's end."""
        if self._summed() != self._checksums:
            raise RefitError("weights that an engine shares with the policy have changed: its process may be gone")

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
    """Yield each parameter with the first rows of an engine's weight that have the same bytes, if there are any."""
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
