"""Straight from a bucket's bytes into an engine's parameters, without its own loader's Python for each tensor.

The loader of an engine renames tensors, puts several into one parameter and takes a tensor-parallel rank's slice. What
it does is watched once, copy by copy; from then on the same copies are made at once. It works for any loader that
copies slices of what it is given. What a loader computes with (casts, say, or transposes and keeps) is given to the
loader each time.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_lite.refit.packing import Arrived
from nemo_rl_lite.refit.report import Named

log = logging.getLogger(__name__)

# An engine's own loader: named tensors -> names of its parameters that it has filled, or None where it does not say.
Load = Callable[[Sequence[Named]], set[str] | None]


@dataclass(frozen=True)
class _Copy:
    """A strided part of a bucket's bytes, and the parameter's part that it goes to."""

    target: Tensor
    offset: int
    """In bytes from the bucket's begin."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def source(self, buffer: Tensor) -> Tensor:
        typed = buffer.view(self.dtype)
        return typed.as_strided(self.size, self.stride, typed.storage_offset() + self.offset // self.dtype.itemsize)


@dataclass
class _Route:
    """What becomes of one bucket: copies, and the tensors that are the loader's."""

    copies: list[_Copy]
    left: set[str]

    def copy(self, buffer: Tensor) -> None:
        if self.copies:
            torch._foreach_copy_([one.target for one in self.copies], [one.source(buffer) for one in self.copies])


class Destinations:
    """Where the tensors of each bucket go in one engine rank. Its parameters must stay where they are in memory."""

    def __init__(self, load: Load):
        self._load = load
        self._routes: dict[int, _Route] = {}
        self._filled: set[str] | None = set()

    @property
    def filled(self) -> set[str] | None:
        """The parameters that the loader has said to have filled; None where it does not say."""
        return self._filled

    @property
    def copied(self) -> tuple[int, int]:
        """How many of the tensors that have come so far are copied straight, and how many are the loader's."""
        left = sum(len(route.left) for route in self._routes.values())
        return sum(len(route.copies) for route in self._routes.values()), left

    @torch.no_grad()
    def fill(self, arrived: Arrived) -> None:
        """Bring a bucket's tensors to their places: by the engine's loader when the bucket comes for the first time,
        and straight when it comes again."""
        route = self._routes.get(arrived.index)
        if route is None:
            self._routes[arrived.index] = self._watched(arrived)
            return
        route.copy(arrived.buffer)
        if route.left:
            self._load([(name, tensor) for name, tensor in arrived.named() if name in route.left])

    def _watched(self, arrived: Arrived) -> _Route:
        with _Watch(arrived) as watch:
            filled = self._load(arrived.named())
        self._filled = None if self._filled is None or filled is None else self._filled | filled
        route = _Route([one for one in watch.copies if watch.name_at(one.offset) not in watch.used], watch.used)
        if not _same(route, arrived.buffer):
            log.warning(
                "%s: copies do not do what the engine's loader does, so it is called", arrived.bucket.describe()
            )
            return _Route([], {slot.name for slot in arrived.bucket.slots})
        if route.left:
            log.info("left to the engine's loader at each refit: %s", ", ".join(sorted(route.left)))
        return route


def _same(route: _Route, buffer: Tensor) -> bool:
    """Whether the copies give what the loader has just put there; if not, it is there again."""
    loaded = [one.target.clone() for one in route.copies]
    for one in route.copies:
        one.target.zero_()
    route.copy(buffer)
    same = all(torch.equal(one.target, value) for one, value in zip(route.copies, loaded, strict=True))
    if not same:
        for one, value in zip(route.copies, loaded, strict=True):
            one.target.copy_(value)
    return same


class _Watch(TorchDispatchMode):
    """Collects the copies from views of a bucket's bytes to elsewhere, and the tensors with which anything else was
    computed."""

    def __init__(self, arrived: Arrived):
        super().__init__()
        self.copies: list[_Copy] = []
        self.used: set[str] = set()
        self._slots, self._buffer = arrived.bucket.slots, arrived.buffer
        self._begin = arrived.buffer.data_ptr()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        incoming = [one for one in tree_leaves((args, kwargs)) if self._is_incoming(one)]
        if not incoming:
            return result
        if func is torch.ops.aten.copy_.default and not self._is_incoming(args[0]) and args[0].shape == args[1].shape:
            target, source = args[0], args[1]
            offset = source.data_ptr() - self._begin
            # Parameters are leaves of autograd; their memory is what is meant.
            copy = _Copy(target.detach(), offset, source.dtype, tuple(source.shape), source.stride())
            self.copies.append(copy)
        elif not all(self._is_incoming(one) for one in tree_leaves(result)) or not tree_leaves(result):
            self.used |= {self.name_at(one.data_ptr() - self._begin) for one in incoming}
        return result

    def name_at(self, offset: int) -> str:
        """The tensor that has the byte at `offset`."""
        return next(slot.name for slot in reversed(self._slots) if slot.offset <= offset)

    def _is_incoming(self, one: Any) -> bool:
        if not isinstance(one, Tensor) or one.device != self._buffer.device or not one.numel():
            return False
        return self._begin <= one.data_ptr() < self._begin + self._buffer.numel()
