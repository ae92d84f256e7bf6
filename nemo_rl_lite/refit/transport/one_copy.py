"""Frozen weights in one copy: an engine shares its weights, and the policy rank on its device frees its own memory
of the same bytes.

Which weights these are is found by comparing bytes, so nothing depends on how either side names or fuses its weights: a
frozen parameter of the policy becomes a view of the first rows of one of the engine's weights. The rows of a padded
vocabulary come last. What the two sides lay out in other ways stays with the policy. Neither side writes to what is
shared, and the engine's weights never move, because its CUDA graphs know their addresses.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.layout.packing import dtype_name, same_bytes
from nemo_rl_lite.refit.transport import device_memory
from nemo_rl_lite.refit.transport.checksum import Checksums
from nemo_rl_lite.refit.transport.sharing import Memory, Sharing, opened

# Elements that are compared at a time, and the first ones by which weights are sorted before.
_COMPARED, _HEAD = 1 << 24, 64
# Checksums are of words.
_WORD = 8
_Head = tuple[torch.dtype, tuple[int, ...], bytes]


@dataclass(frozen=True)
class SharedWeights:
    """The weights of one engine rank: where they are, and each one's dtype and shape. It is pickled."""

    addresses: bytes
    weights: Sequence[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class FrozenBytes:
    """Bytes of a policy rank's frozen weights that are an engine's, and that both sides hold."""

    shared: int
    twice: int


def share_weights(weights: Iterable[Tensor], memory: Memory = device_memory) -> SharedWeights:
    """Share an engine's weights, which nobody may write to, move or free from now on.

    Raises:
        RefitError: the memory cannot be shared.
    """
    shared = [weight.detach() for weight in weights if weight.dim() and weight.numel() and weight.is_contiguous()]
    with _naming_the_key():
        addresses = Sharing(dict(enumerate(shared)), 0, [0], None, memory).addresses()
    return SharedWeights(addresses, [(dtype_name(weight.dtype), tuple(weight.shape)) for weight in shared])


class InEngine:
    """The parameters of a policy rank whose memory is an engine's, from `take` until this process ends."""

    def __init__(self, memory: Memory = device_memory):
        self._memory, self._open = memory, ExitStack()
        self._parameters: dict[int, Tensor] = {}
        self._checksums: list[int] = []

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._parameters

    @torch.no_grad()
    def take(self, weights: SharedWeights, parameters: Iterable[Tensor]) -> FrozenBytes:
        """Let those of the `parameters` that are frozen be the engine's memory, as far as it has the same bytes. Their
        own memory is free where nothing else refers to it.

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
        shared = sum(map(_nbytes, self._parameters.values()))
        return FrozenBytes(shared, sum(map(_nbytes, frozen)) - shared)

    def check(self) -> None:
        """Check that the shared memory is what it was. Raises RefitError: it is not, as after the engine's end."""
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
        raise RefitError(f"{error}; refit.direct=false keeps a copy of the frozen weights on each side") from error


def _equal(parameters: Iterable[Tensor], of_engine: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with the first rows of a weight of the engine that have the same bytes, if there are any."""
    candidates = defaultdict[_Head, list[Tensor]](list)
    for weight in of_engine:
        candidates[_head(weight)].append(weight)
    for parameter in parameters:
        rows = len(parameter)
        own = parameter.detach()
        of_this_size = (one[:rows] for one in candidates[_head(own)] if len(one) >= rows)
        same = next((one for one in of_this_size if _nbytes(one) % _WORD == 0 and _same(own, one)), None)
        if same is not None:
            yield parameter, same


def _head(weight: Tensor) -> _Head:
    first = weight[0].reshape(-1)[:_HEAD].contiguous().cpu()
    return weight.dtype, tuple(weight.shape[1:]), bytes(first.view(-1).view(torch.uint8).tolist())


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal to the bit; in parts, which take less memory."""
    rows = max(1, _COMPARED * len(one) // one.numel())
    return one.is_contiguous() and all(map(same_bytes, one.split(rows), other.split(rows)))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
