"""From a bucket's bytes into an engine's parameters, without its own loader's work for each tensor.

The loader of an engine renames tensors, puts several into one parameter and takes a tensor-parallel rank's slice. What
it does is watched once, copy by copy; from then on the same copies are made by themselves. Tensors that a loader does
more with than copy parts of them into the engine's memory stay with the loader, and so does a bucket during which it
writes anything else there.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_lite.refit.packing import Arrived, CopyList, dtype_name, same_bytes
from nemo_rl_lite.refit.parts import Part
from nemo_rl_lite.refit.plan import Slot
from nemo_rl_lite.refit.report import Named

log = logging.getLogger(__name__)

# An engine's own loader: named tensors -> names of its parameters that it has filled, or None where it does not say.
Load = Callable[[Sequence[Named]], set[str] | None]
# What writes the same whatever was loaded.
_CONSTANT = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(frozen=True)
class _Copy:
    """A strided part of the tensor `name` in a bucket's bytes, and the parameter's part that it goes to."""

    name: str
    target: Tensor
    offset: int
    """In bytes from the bucket's begin."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    part: Part | None
    """What of the tensor that is; None where it does not go to one place as it is."""

    def source(self, buffer: Tensor) -> Tensor:
        typed = buffer.view(self.dtype)
        return typed.as_strided(self.size, self.stride, typed.storage_offset() + self.offset // self.dtype.itemsize)


@dataclass
class _Route:
    """What becomes of one bucket: copies, and the tensors that are the loader's."""

    copies: list[_Copy]
    left: set[str]
    _ready: tuple[int, CopyList] | None = None

    def copy(self, buffer: Tensor) -> None:
        """A bucket mostly comes in the same memory, so the views of it are kept."""
        if self._ready is None or self._ready[0] != buffer.data_ptr():
            sources = [one.source(buffer) for one in self.copies]
            self._ready = buffer.data_ptr(), CopyList([one.target for one in self.copies], sources)
        self._ready[1].run()

    def forget_buffer(self) -> None:
        self._ready = None


class Destinations:
    """Where the tensors of each bucket go in one engine rank."""

    def __init__(self, load: Load, memory: Iterable[Tensor]):
        """`memory`: all that the engine computes with, its parameters and buffers; they must stay where they are."""
        self._load, self._memory = load, {tensor.untyped_storage()._cdata for tensor in memory}
        self._routes: dict[int, _Route] = {}
        self._filled: set[str] | None = set()

    @property
    def filled(self) -> set[str] | None:
        """The parameters that the loader has said to have filled; None where it does not say."""
        return self._filled

    @property
    def left(self) -> set[str]:
        """The tensors, of those that have come so far, that the loader gets at each refit."""
        return {name for route in self._routes.values() for name in route.left}

    def parts(self) -> list[tuple[str, Part, Tensor]] | None:
        """Of each tensor the parts that go somewhere, and the contiguous memory that each goes to as it is; None where
        the loader does more than that. After the first refit."""
        copies = [one for route in self._routes.values() for one in route.copies]
        found = [(one.name, one.part, one.target) for one in copies if one.part is not None]
        return found if len(found) == len(copies) and not self.left else None

    def forget_buffers(self) -> None:
        """Keep no views of buckets' memory, so that it can be given back."""
        for route in self._routes.values():
            route.forget_buffer()

    @torch.no_grad()
    def fill(self, arrived: Arrived) -> None:
        """Bring a bucket's tensors to their places: by the engine's loader when the bucket comes for the first time,
        and by copies when it comes again."""
        route = self._routes.get(arrived.index)
        if route is None:
            self._routes[arrived.index] = self._watched(arrived)
            return
        route.copy(arrived.buffer)
        if route.left:
            self._load([(name, tensor) for name, tensor in arrived.named() if name in route.left])

    def _watched(self, arrived: Arrived) -> _Route:
        with _Watch(arrived, self._memory) as watch:
            filled = self._load(arrived.named())
        self._filled = None if self._filled is None or filled is None else self._filled | filled
        left = watch.used | {one.name for one in watch.copies if not _does_the_same(one, arrived.buffer)}
        if watch.wrote_more:
            left = {slot.name for slot in arrived.bucket.slots}
        if left:
            log.info("left to the engine's loader at each refit: %s", ", ".join(sorted(left)))
        return _Route([one for one in watch.copies if one.name not in left], left)


def _does_the_same(copy: _Copy, buffer: Tensor) -> bool:
    """Whether the copy gives what the loader has just put there; if not, it is there again."""
    loaded = copy.target.clone()
    copy.target.zero_()
    copy.target.copy_(copy.source(buffer))
    same = same_bytes(copy.target, loaded)
    if not same:
        copy.target.copy_(loaded)
    return same


class _Watch(TorchDispatchMode):
    """Collects copies from views of a bucket's bytes to the engine's `memory`, and the tensors with which anything else
    was done."""

    def __init__(self, arrived: Arrived, memory: set[int]):
        super().__init__()
        self.copies: list[_Copy] = []
        self.used: set[str] = set()
        self.wrote_more = False
        self._slots, self._buffer, self._memory = arrived.bucket.slots, arrived.buffer, memory
        self._begin = arrived.buffer.data_ptr()
        # Results of computing with what came, kept so that no other tensor gets their address.
        self._computed: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        written = [one for one in _written(func, args, kwargs) if isinstance(one, Tensor)]
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        read = [one for one in given if all(one is not other for other in written)]
        incoming = [one for one in given if self._is_incoming(one)]
        to_engine = any(one.untyped_storage()._cdata in self._memory for one in written)
        if func is torch.ops.aten.copy_.default and to_engine and self._is_part(args[1], args[0]):
            self.copies.append(self._copy(args[0], args[1]))
        elif incoming and (written or not self._only_views(result)):
            self.used |= {self._slot(one).name for one in incoming}
            self._keep([*written, *tree_leaves(result)])
        elif any(one.untyped_storage()._cdata in self._computed for one in read):
            self._keep([*written, *tree_leaves(result)])
        elif to_engine and func not in _CONSTANT:
            self.wrote_more = True
        return result

    def _copy(self, target: Tensor, source: Tensor) -> _Copy:
        offset, size, slot = source.data_ptr() - self._begin, tuple(source.shape), self._slot(source)
        part = None
        if target.is_contiguous() and target.dtype == source.dtype and dtype_name(source.dtype) == slot.dtype:
            begin = (offset - slot.offset) // source.element_size()
            part = Part(math.prod(slot.shape), begin, size, source.stride())
        # Parameters are leaves of autograd; their memory is what is meant.
        return _Copy(slot.name, target.detach(), offset, source.dtype, size, source.stride(), part)

    def _keep(self, tensors: Iterable[Any]) -> None:
        for one in tensors:
            if (
                isinstance(one, Tensor)
                and one.untyped_storage()._cdata not in self._memory
                and not self._is_incoming(one)
            ):
                self._computed[one.untyped_storage()._cdata] = one

    def _only_views(self, result: Any) -> bool:
        return bool(tree_leaves(result)) and all(self._is_incoming(one) for one in tree_leaves(result))

    def _is_part(self, source: Any, target: Tensor) -> bool:
        return self._is_incoming(source) and not self._is_incoming(target) and source.shape == target.shape

    def _is_incoming(self, one: Any) -> bool:
        if not isinstance(one, Tensor) or one.device != self._buffer.device or not one.numel():
            return False
        return self._begin <= one.data_ptr() < self._begin + self._buffer.numel()

    def _slot(self, incoming: Tensor) -> Slot:
        offset = incoming.data_ptr() - self._begin
        return next(slot for slot in reversed(self._slots) if slot.offset <= offset)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that the operation writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tree_leaves(given)
