"""Send tensors from the host to the device that trains, many of them in one copy.

A copy engine works in order. While optimizer states come back (see offload/copies.py), each copy waits a millisecond or
more for the pieces before it, and so does the work on the GPU that needs it. A micro-batch is a dozen small tensors.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

# Tensors of any type may begin at its multiples, and CUDA's kernels read fastest there.
_ALIGNED = 256


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Begin to copy `values` to `device`. Work there sees the copy; the host waits neither for it nor for work before
    it, because a GPU reads from page-locked memory by itself."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def sent_together(values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """As `sent`, with one copy to a GPU. What arrives shares its memory, and must not be changed in place: autograd
    would take that for a change of all."""
    if device.type != "cuda":
        return {name: one.to(device) for name, one in values.items()}
    return unpacked(packed(values, pin=True).to(device, non_blocking=True), values)


def packed(values: Mapping[str, Tensor], pin: bool) -> Tensor:
    """The bytes of tensors on the host, uint8 [n], in page-locked memory or not."""
    whole = torch.empty(packed_bytes(values), dtype=torch.uint8, pin_memory=pin)
    for name, place in unpacked(whole, values).items():
        place.copy_(values[name])
    return whole


def unpacked(whole: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of `packed` bytes, wherever they are now, with the names, types and shapes of `like`."""
    return {
        name: whole[start : start + one.nbytes].view(one.dtype).view(one.shape) for name, one, start in _places(like)
    }


def packed_bytes(values: Mapping[str, Tensor]) -> int:
    """How many bytes `packed` has."""
    return sum(_rounded(one.nbytes) for one in values.values())


def _places(values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, int]]:
    start = 0
    for name, one in values.items():
        yield name, one, start
        start += _rounded(one.nbytes)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
