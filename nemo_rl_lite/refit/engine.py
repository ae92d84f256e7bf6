"""Engine side of refits: an engine rank's connection to its producer, and loaders of received weights.

An engine's loader renames tensors, fuses several into one parameter and takes a tensor-parallel rank's slice.
`CopyReplayLoader` records these copies once and replays them. The engine's loader still loads tensors that need more
than copies, and buckets whose loading writes anything else to the engine's memory.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import TorchDispatchMode, storage_id, tree_leaves, written_arguments
from nemo_rl_lite.config.schema import RefitConfig
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.group import Rendezvous, join_at
from nemo_rl_lite.refit.interface import Loader, Receiver, WeightSource, Window
from nemo_rl_lite.refit.layout import CopyList, Named, ReceivedBucket, RefitPlan, Slot, dtype_name, same_bytes
from nemo_rl_lite.refit.trace import StridedView

log = logging.getLogger(__name__)

# An engine's loader: takes named tensors; returns the names of filled parameters, or None if it does not report them.
Load = Callable[[Sequence[Named]], set[str] | None]

# Operations whose result does not depend on the loaded weights.
_CONSTANT = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(frozen=True)
class Source:
    """Everything that a consumer needs to connect to its producer."""

    plan: RefitPlan
    config: RefitConfig
    rendezvous: Rendezvous
    offer: WeightSource


def connect(source: Source, device: torch.device) -> Receiver:
    """Join the producer's group; returns when all its ranks have joined. `device`: of the engine's weights."""
    config, offer = source.config, source.offer
    group = join_at(source.rendezvous, offer.group_device(device), config.timeout_s)
    return offer.receiver(source.plan, group, device, config.verify)


class WeightsState:
    """State of an engine's weights: complete if they are all of one refit. They are incomplete before the first refit
    of dummy weights, during a refit, and after a failed one."""

    def __init__(self, complete: bool) -> None:
        self._complete = complete

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Mark the block as a refit."""
        self._complete = False
        yield
        self._complete = True

    def discard(self) -> None:
        """Note that the weights were freed."""
        self._complete = False

    def require(self) -> None:
        """Raise RefitError if the weights are incomplete."""
        if not self._complete:
            raise RefitError(
                "this engine has no policy weights: it received none since its start or sleep, or the last refit failed"
            )


class EngineLoader(Loader):
    """Passes each bucket's tensors to an engine's loader. `filled`: reported parameters; None if it reports none."""

    def __init__(self, load: Load, keep: bool = False):
        """`keep`: pass copies that the loader may keep."""
        self._load, self._keep = load, keep
        self.filled: set[str] | None = set()

    def fill(self, arrived: ReceivedBucket) -> None:
        named = arrived.named()
        self._load_named([(name, tensor.clone()) for name, tensor in named] if self._keep else named)

    def _load_named(self, named: Sequence[Named]) -> None:
        filled = self._load(named)
        self.filled = None if self.filled is None or filled is None else self.filled | filled


@dataclass(frozen=True)
class _Copy:
    """Copy of a window of a bucket's bytes, in elements of `dtype` and within one tensor, to `target`."""

    name: str
    target: Tensor
    dtype: torch.dtype
    view: StridedView
    window: tuple[int, StridedView] | None
    """The tensor's number of elements and the window in it; None if the bytes change or `target` is not contiguous."""

    def source(self, buffer: Tensor) -> Tensor:
        return self.view.of(buffer.view(self.dtype))


@dataclass
class _Handling:
    """Replay of one bucket: copies, and the tensors `left` to the engine's loader."""

    copies: list[_Copy]
    left: set[str]
    _ready: tuple[int, CopyList] | None = None

    def copy(self, buffer: Tensor) -> None:
        # Views are cached, because a bucket mostly arrives in the same memory.
        if self._ready is None or self._ready[0] != buffer.data_ptr():
            sources = [one.source(buffer) for one in self.copies]
            self._ready = buffer.data_ptr(), CopyList([one.target for one in self.copies], sources)
        self._ready[1].run()


class CopyReplayLoader(EngineLoader):
    """Records the copies of an engine rank's loader at a bucket's first arrival, and replays them later."""

    def __init__(self, load: Load, memory: Iterable[Tensor]):
        """`memory`: the engine's parameters and buffers, which must not move."""
        super().__init__(load)
        self._memory = {storage_id(tensor) for tensor in memory}
        self._handling: dict[int, _Handling] = {}

    @property
    def left(self) -> set[str]:
        """Return the received tensors that the engine's loader loads at each refit."""
        return {name for one in self._handling.values() for name in one.left}

    def windows(self) -> list[Window] | None:
        copies = [one for handling in self._handling.values() for one in handling.copies]
        found = [(one.name, *one.window, one.target) for one in copies if one.window is not None]
        return found if len(found) == len(copies) and not self.left else None

    def forget_buffers(self) -> None:
        for handling in self._handling.values():
            handling._ready = None

    @torch.no_grad()
    def fill(self, arrived: ReceivedBucket) -> None:
        handling = self._handling.get(arrived.index)
        if handling is None:
            self._handling[arrived.index] = self._watched(arrived)
            return
        handling.copy(arrived.buffer)
        if handling.left:
            self._load([(name, tensor) for name, tensor in arrived.named() if name in handling.left])

    def _watched(self, arrived: ReceivedBucket) -> _Handling:
        with _CopyRecorder(arrived, self._memory) as watch:
            self._load_named(arrived.named())
        left = watch.used | {one.name for one in watch.copies if not _is_repeatable(one, arrived.buffer)}
        if watch.wrote_more:
            left = {slot.name for slot in arrived.bucket.slots}
        if left:
            log.info("the engine's loader loads at each refit: %s", ", ".join(sorted(left)))
        return _Handling([one for one in watch.copies if one.name not in left], left)


def _is_repeatable(copy: _Copy, buffer: Tensor) -> bool:
    """Return whether the copy reproduces the loader's result; if not, restore that result."""
    loaded = copy.target.clone()
    copy.target.zero_()
    copy.target.copy_(copy.source(buffer))
    same = same_bytes(copy.target, loaded)
    if not same:
        copy.target.copy_(loaded)
    return same


class _CopyRecorder(TorchDispatchMode):
    """Collects copies from views of a bucket to the engine's `memory`, and tensors with any other use."""

    def __init__(self, arrived: ReceivedBucket, memory: set[int]):
        super().__init__()
        self.copies: list[_Copy] = []
        self.used: set[str] = set()
        self.wrote_more = False
        self._slots, self._buffer, self._memory = arrived.bucket.slots, arrived.buffer, memory
        self._begin = arrived.buffer.data_ptr()
        # Tensors computed from the bucket's; kept, so that their addresses are not reused.
        self._computed: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        written = [one for one in written_arguments(func, args, kwargs) if isinstance(one, Tensor)]
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        read = [one for one in given if all(one is not other for other in written)]
        incoming = [one for one in given if self._is_incoming(one)]
        results = tree_leaves(result)
        gives_views = bool(results) and all(self._is_incoming(one) for one in results)
        to_engine = any(storage_id(one) in self._memory for one in written)
        if func is torch.ops.aten.copy_.default and to_engine and self._is_window(args[1], args[0]):
            self.copies.append(self._copy(args[0], args[1]))
        elif incoming and (written or not gives_views):
            self.used |= {self._slot(one).name for one in incoming}
            self._keep([*written, *results])
        elif any(storage_id(one) in self._computed for one in read):
            self._keep([*written, *results])
        elif to_engine and func not in _CONSTANT:
            self.wrote_more = True
        return result

    def _copy(self, target: Tensor, source: Tensor) -> _Copy:
        offset, size, slot = source.data_ptr() - self._begin, source.element_size(), self._slot(source)
        window = None
        if target.is_contiguous() and target.dtype == source.dtype and dtype_name(source.dtype) == slot.dtype:
            begin = (offset - slot.offset) // size
            window = math.prod(slot.shape), StridedView(begin, tuple(source.shape), source.stride())
        view = StridedView(offset // size, tuple(source.shape), source.stride())
        # Detached, because parameters are leaves of autograd.
        return _Copy(slot.name, target.detach(), source.dtype, view, window)

    def _keep(self, tensors: Iterable[Any]) -> None:
        for one in tensors:
            if isinstance(one, Tensor) and storage_id(one) not in self._memory and not self._is_incoming(one):
                self._computed[storage_id(one)] = one

    def _is_window(self, source: Any, target: Tensor) -> bool:
        return self._is_incoming(source) and not self._is_incoming(target) and source.shape == target.shape

    def _is_incoming(self, one: Any) -> bool:
        if not isinstance(one, Tensor) or one.device != self._buffer.device or not one.numel():
            return False
        return self._begin <= one.data_ptr() < self._begin + self._buffer.numel()

    def _slot(self, incoming: Tensor) -> Slot:
        offset = incoming.data_ptr() - self._begin
        return next(slot for slot in reversed(self._slots) if slot.offset <= offset)
