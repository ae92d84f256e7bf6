"""Weights straight out of a policy's parameters into those of an engine on the same devices: one copy, and no buffer.

The producer says at each refit where the parameters are, which may have moved, and waits. The consumer opens that
memory, copies, and closes it. At the first refit the consumer puts each bucket together in its own memory, for the
engine's loader. If the loader does no more than copy windows of tensors, both ends of each copy are known from then on,
and a tensor-parallel consumer reads only what it needs, from whichever GPU of the machine has it.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.layout.packing import Arrived, CopyList, new_buffers, view
from nemo_rl_lite.refit.layout.plan import RefitPlan
from nemo_rl_lite.refit.layout.views import Recipe, Segment
from nemo_rl_lite.refit.layout.windows import segments_of_window
from nemo_rl_lite.refit.transport import device_memory
from nemo_rl_lite.refit.transport.checksum import Verify, looked_at
from nemo_rl_lite.refit.transport.group import RefitGroup
from nemo_rl_lite.refit.transport.interface import Loader, settle
from nemo_rl_lite.refit.transport.report import RefitReport
from nemo_rl_lite.refit.transport.sharing import Key, Memory, Parameters, Sharing, opened

log = logging.getLogger(__name__)

# Elements compared at a time.
_COMPARED = 2**24
Copy = tuple[str, Segment, Tensor]
"""A tensor's name, the segment whose source is copied, and the memory that it is copied to."""


@dataclass(frozen=True)
class DirectOffer:
    """An `Offer` of the parameters themselves. `recipe`: which windows of them each tensor is made of."""

    recipe: Recipe

    def group_device(self, device: torch.device) -> torch.device:
        # Only small messages travel.
        return torch.device("cpu")

    def receiver(self, plan: RefitPlan, group: RefitGroup, device: torch.device, verify: Verify) -> "DirectReceiver":
        return DirectReceiver(plan, group, self.recipe, device, verify)


class DirectSender:
    """Lets consumers copy the parameters as they are when `send` is called."""

    def __init__(self, plan: RefitPlan, group: RefitGroup, sharing: Sharing):
        self._plan, self._group, self._sharing = plan, group, sharing

    def send(self) -> RefitReport:
        """See `Sender.send`; all ranks that share together call it, and it returns when the consumers of all are done.

        Stages timed: `pack` (finding the memory of all ranks), `transfer` (waiting for consumers).
        """
        report, clock, error = RefitReport(), time.perf_counter(), None
        addresses = self._sharing.addresses()
        try:
            self._group.announce(self._plan.digest)
            self._group.send_message(addresses)
            clock = report.add("pack", clock)
            self._group.meet("the end of the refit")
        except RefitError as raised:
            error = raised
        self._sharing.end(error)
        report.add("transfer", clock)
        return report


class DirectReceiver:
    """Copies parameters, by way of buckets until it is known where each window of them goes."""

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
        # None: all parameters.
        self._needed: set[Key] | None = None
        self._bring: Callable[[Loader, Parameters], None] = self._load_first
        # The parameters' addresses, and the copies for them; None as long as refits go through buckets.
        self._ready: tuple[list[int], CopyList] | None = None

    def receive(self, loader: Loader) -> RefitReport:
        """See `Receiver.receive`. Raises RefitError also for memory that cannot be opened, or for a weight that differs
        from the producer's after it was copied."""
        report, clock = RefitReport(), time.perf_counter()
        self._group.expect(self._plan.digest)
        addresses = self._group.receive_message()
        report.add("transfer", clock)
        with opened(addresses, self._memory, self._needed) as parameters:
            try:
                self._bring(loader, parameters)
            finally:
                settle(torch.empty(0, device=self._device))
        self._group.meet("the end of the refit")
        if self._ready is None and self._device.type == "cuda":
            # The policy or the cache may want the memory of buckets and trials.
            torch.cuda.empty_cache()
        return report

    def _load_first(self, loader: Loader, parameters: Parameters) -> None:
        """Load through buckets, and find out whether later refits can do without."""
        self._load(loader, parameters)
        copies = self._find_copies(loader, parameters)
        if copies is None:
            self._bring = self._load
        else:
            self._needed = {_key(segment) for _, segment, _ in copies}
            self._bring = partial(self._copy, copies)

    def _load(self, loader: Loader, parameters: Parameters) -> None:
        buffer = new_buffers(self._plan, 1, self._device)[0]
        for index, bucket in enumerate(self._plan.buckets):
            copies = [
                (slot.name, segment, segment.target.of(view(buffer, slot)))
                for slot in bucket.slots
                for segment in self._recipe[slot.name]
            ]
            self._run(_copy_list(copies, parameters), copies, parameters)
            loader.fill(Arrived(index, bucket, buffer[: bucket.nbytes]))
        loader.forget_buffers()

    def _find_copies(self, loader: Loader, parameters: Parameters) -> list[Copy] | None:
        """Where each window of a parameter goes; None if copying them does not give what the loader has just put
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

    def _copy(self, copies: Sequence[Copy], loader: Loader, parameters: Parameters) -> None:
        addresses = [parameter.data_ptr() for parameter in parameters.values()]
        if self._ready is None or self._ready[0] != addresses:
            self._ready = addresses, _copy_list(copies, parameters)
        self._run(self._ready[1], copies, parameters)

    def _run(self, copy_list: CopyList, copies: Sequence[Copy], parameters: Parameters) -> None:
        copy_list.run()
        differing = _differing(looked_at(self._verify, copies), parameters)
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
    """The first tensor of which a copied window differs from the parameter, to the bit."""
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
    """The tensor in slabs, so that comparing it takes little additional memory."""
    whole = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    return whole.split(max(1, _COMPARED * whole.shape[0] // max(1, whole.numel())))
