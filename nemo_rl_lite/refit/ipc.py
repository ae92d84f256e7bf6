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
"""Policy rank, and the number of one of its parameters."""

Parameters = Mapping[Key, Tensor]
"""Contiguous tensors; uint8 [bytes] for another process's."""

# Elements per comparison.
_COMPARED = 1 << 24

# Identifies a kernel, whose processes can share memory.
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Memory(Protocol):
    """Shares device memory between processes; on GPUs, the module `device_memory`."""

    def allocation(self, tensor: Tensor) -> int: ...

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
    entries = [(key, place) for key, place in _entries(addresses) if wanted is None or key in wanted]
    with memory.opened(dict.fromkeys(handle for _, (handle, _, _) in entries)) as begins:
        yield {key: memory.tensor_at(begins[handle] + offset, size) for key, (handle, offset, size) in entries}


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
        # None for refits through buckets, which need all parameters.
        self._copies: list[Copy] | None = None
        self._needed: set[Key] | None = None
        self._is_first = True
        # Parameter addresses, and the copies for them.
        self._ready: tuple[list[int], CopyList] | None = None

    def receive(self, loader: Loader) -> RefitReport:
        """See `Receiver.receive`. Also raises RefitError: memory cannot be opened, or a copied weight differs."""
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
            # Free the memory of buckets and comparisons for the policy and the KV cache.
            torch.cuda.empty_cache()
        return report

    def _load(self, loader: Loader, parameters: Parameters) -> None:
        """Load through buckets; the first time, decide whether later refits can copy directly."""
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
        if reason is None and (differing := _differing(copies, parameters)) is not None:
            reason = f"the engine changed {differing} when it was loaded"
        if reason is not None:
            log.info("every refit goes through buckets: %s", reason)
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
            raise RefitError(f"the engine's {differing} differs from the policy's after the copy")


def _copy_list(copies: Sequence[Copy], parameters: Parameters) -> CopyList:
    sources = [_source(segment, parameters, target.dtype) for _, segment, target in copies]
    return CopyList([target for _, _, target in copies], sources)


def _key(segment: Segment) -> Key:
    return segment.rank, segment.parameter


def _source(segment: Segment, parameters: Parameters, dtype: torch.dtype) -> Tensor:
    return segment.source.of(parameters[_key(segment)].view(dtype))


def _differing(copies: Iterable[Copy], parameters: Parameters) -> str | None:
    """Return the first tensor with a copied window that is not bitwise identical to the parameter's."""
    names, equal = list[str](), list[Tensor]()
    for name, segment, target in copies:
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.element_size()]
        source = _source(segment, parameters, target.dtype)
        for ours, theirs in zip(_slabs(target.view(bits)), _slabs(source.view(bits)), strict=True):
            names.append(name)
            equal.append((ours == theirs).all())
    # Synchronize once for all results.
    return names[torch.stack(equal).tolist().index(False)] if equal and not torch.stack(equal).all() else None


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
    """Parameters of a policy rank in an engine's memory, from `take` until this process ends."""

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
