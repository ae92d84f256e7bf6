"""Weights straight out of a policy's parameters into those of an engine on the same devices: one copy, and no buffer.

The producer says at each refit where the parameters are, which may have moved, and waits. The consumer opens that
memory, copies, and closes it again. The first time it puts each bucket together in memory of its own, for the engine's
loader; where the loader turns out to do no more than copy parts of tensors, the two ends of each copy are known from
then on, and a tensor-parallel consumer reads no more than its own parts, from whichever GPU of the machine has them.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit import device_memory
from nemo_rl_lite.refit.boxes import Piece
from nemo_rl_lite.refit.checksum import Verify, looked_at
from nemo_rl_lite.refit.destinations import Destinations
from nemo_rl_lite.refit.group import RefitGroup
from nemo_rl_lite.refit.lending import Key, Lending, Memory, Parameters, opened, settle
from nemo_rl_lite.refit.packing import Arrived, CopyList, new_buffers, view
from nemo_rl_lite.refit.parts import boxes_of_part
from nemo_rl_lite.refit.plan import RefitPlan
from nemo_rl_lite.refit.report import RefitReport
from nemo_rl_lite.refit.routes import Recipe

log = logging.getLogger(__name__)

# Elements that are compared at a time.
_COMPARED = 2**24
Target = tuple[str, Piece, Tensor]
"""A tensor's name, a part of a parameter, and where that goes."""


@dataclass(frozen=True)
class DirectSource:
    """What a consumer has to know once: which parts of which policy rank's parameters each tensor is made of."""

    recipe: Recipe


class DirectSender:
    """A producer's side: `lend` as often as there are new weights, on all ranks that lend together."""

    def __init__(self, plan: RefitPlan, group: RefitGroup, lending: Lending):
        """What the lent parameters hold when `lend` is called is what consumers get."""
        self._plan, self._group, self._lending = plan, group, lending

    def lend(self) -> RefitReport:
        """Let consumers copy; returns when those of all ranks have.

        Stages timed: `pack` (finding the memory, of all ranks), `transfer` (waiting for consumers).

        Raises:
            RefitError: a consumer that was not done in time, or a failure on another rank.
        """
        report, clock, error = RefitReport(), time.perf_counter(), None
        where = self._lending.where()
        try:
            self._group.announce(self._plan.digest)
            self._group.tell(where)
            clock = report.add("pack", clock)
            self._group.meet("the end of the refit")
        except RefitError as raised:
            error = raised
        self._lending.end(error)
        report.add("transfer", clock)
        return report


class DirectReceiver:
    """The consumer's side, kept from refit to refit. Without an engine's `Destinations` iterate over it for bucket
    after bucket, each in the same memory; `report` is that of the last refit."""

    def __init__(
        self,
        plan: RefitPlan,
        group: RefitGroup,
        recipe: Recipe,
        device: torch.device,
        verify: Verify,
        memory: Memory = device_memory,
    ):
        self.report = RefitReport()
        self._plan, self._group, self._recipe, self._device = plan, group, recipe, device
        self._verify, self._memory = verify, memory
        self._targets: list[Target] | None = None
        # None: all parameters.
        self._needed: set[Key] | None = None
        self._is_first = True
        # For parameters at these addresses.
        self._ready: tuple[list[int], CopyList] | None = None

    def __iter__(self) -> Iterator[Arrived]:
        """Raises RefitError: another plan than the producer's, memory that cannot be opened, or a weight that is not as
        the producer has it after it was copied."""
        with self._lent() as parameters:
            yield from self._put_together(parameters)

    def fill(self, destinations: Destinations) -> None:
        """One refit of an engine.

        Raises:
            RefitError: as for `__iter__`.
        """
        with self._lent() as parameters:
            if self._targets is not None:
                self._copy(self._targets, parameters)
                return
            self._load(destinations, parameters)
            if self._is_first:
                self._targets = self._direct(destinations, parameters)
                if self._targets is not None:
                    self._needed = {_key(piece) for _, piece, _ in self._targets}
                self._is_first = False
        if self._device.type == "cuda":
            # The policy or the cache may want what buckets and trials took.
            torch.cuda.empty_cache()

    def _load(self, destinations: Destinations, parameters: Parameters) -> None:
        for arrived in self._put_together(parameters):
            destinations.fill(arrived)
        destinations.forget_buffers()

    @contextmanager
    def _lent(self) -> Iterator[Parameters]:
        """For one refit."""
        self.report, clock = RefitReport(), time.perf_counter()
        self._group.expect(self._plan.digest)
        where = self._group.hear()
        self.report.add("transfer", clock)
        with opened(where, self._memory, self._needed) as parameters:
            try:
                yield parameters
            finally:
                settle(torch.empty(0, device=self._device))
        self._group.meet("the end of the refit")

    def _put_together(self, parameters: Parameters) -> Iterator[Arrived]:
        buffer = new_buffers(self._plan, 1, self._device)[0]
        for index, bucket in enumerate(self._plan.buckets):
            targets = [
                (slot.name, box.piece, box.of(view(buffer, slot)))
                for slot in bucket.slots
                for box in self._recipe[slot.name]
            ]
            self._run(_copies(targets, parameters), targets, parameters)
            yield Arrived(index, bucket, buffer[: bucket.nbytes])

    def _direct(self, destinations: Destinations, parameters: Parameters) -> list[Target] | None:
        """Where each part of a parameter goes, after a first refit; None where that does not give what the engine's
        loader has just put there."""
        parts, targets = destinations.parts(), list[Target]()
        if parts is None:
            log.info("every refit goes through buckets: the engine's loader does more than copy parts of tensors")
            return None
        for name, part, target in parts:
            boxes = boxes_of_part(self._recipe[name], part)
            if boxes is None:
                log.info("every refit goes through buckets: the engine takes too irregular a part of %s", name)
                return None
            targets += [(name, box.piece, box.of(target)) for box in boxes]
        differing = _differing(targets, parameters)
        if differing is not None:
            log.info("every refit goes through buckets: the engine has %s otherwise than it was loaded", differing)
            return None
        log.info("refits from now on: %d copies out of the policy's parameters", len(targets))
        return targets

    def _copy(self, targets: Sequence[Target], parameters: Parameters) -> None:
        addresses = [parameter.data_ptr() for parameter in parameters.values()]
        if self._ready is None or self._ready[0] != addresses:
            self._ready = addresses, _copies(targets, parameters)
        self._run(self._ready[1], targets, parameters)

    def _run(self, copies: CopyList, targets: Sequence[Target], parameters: Parameters) -> None:
        copies.run()
        differing = _differing(looked_at(self._verify, targets), parameters)
        if differing is not None:
            raise RefitError(f"the engine's {differing} is not the policy's after it was copied")


def _copies(targets: Sequence[Target], parameters: Parameters) -> CopyList:
    sources = [_source(piece, parameters, target.dtype) for _, piece, target in targets]
    return CopyList([target for _, _, target in targets], sources)


def _key(piece: Piece) -> Key:
    return piece.rank, piece.part


def _source(piece: Piece, parameters: Parameters, dtype: torch.dtype) -> Tensor:
    return piece.of(parameters[_key(piece)].view(dtype))


def _differing(targets: Iterable[Target], parameters: Parameters) -> str | None:
    """The first of the tensors of which a part is not as in the parameters, to the bit."""
    names, equal = list[str](), list[Tensor]()
    for name, piece, target in targets:
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.element_size()]
        source = _source(piece, parameters, target.dtype)
        for ours, theirs in zip(_slabs(target.view(bits)), _slabs(source.view(bits)), strict=True):
            names.append(name)
            equal.append((ours == theirs).all())
    # Read at once: each reading waits for the device.
    return names[torch.stack(equal).tolist().index(False)] if equal and not torch.stack(equal).all() else None


def _slabs(tensor: Tensor) -> Sequence[Tensor]:
    """The tensor in parts, so that comparing it takes little memory beside it."""
    whole = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    return whole.split(max(1, _COMPARED * whole.shape[0] // max(1, whole.numel())))
