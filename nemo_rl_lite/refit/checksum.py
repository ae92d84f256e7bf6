"""One number for the bytes of a buffer, cheap on any device, that changes when bytes change or move."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

_WORDS = 1 << 20
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio
Verify = Literal["off", "sample", "full"]

# One chunk in so many is looked at, the first among them; 0 for none.
_EVERY: dict[Verify, int] = {"off": 0, "sample": 16, "full": 1}


def looked_at[Item](verify: Verify, items: Sequence[Item]) -> Sequence[Item]:
    """Those of the items that are verified."""
    return items[:: _EVERY[verify]] if _EVERY[verify] else []


class Checksums:
    """Those of buffer after buffer, computed on the buffers' device and read from it once, by `values`."""

    def __init__(self, verify: Verify):
        self._every = _EVERY[verify]
        self._sums: list[Tensor] = []

    def add(self, buffer: Tensor) -> None:
        """Of a contiguous uint8 tensor whose length is a multiple of 8. What the device's current stream does next may
        change it.

        Raises:
            ValueError: another dtype, layout or length.
        """
        if self._every:
            self._sums.append(_sum(buffer, self._every))

    def values(self) -> list[int]:
        """A number a buffer, in order; none where nothing is verified."""
        return [number & (2**64 - 1) for number in torch.stack(self._sums).tolist()] if self._sums else []


def _sum(buffer: Tensor, every: int) -> Tensor:
    """The checksum of one chunk in `every`, a number on the buffer's device.

    Sum modulo 2^64 of the 64-bit words, each mixed with its position by steps that can be undone, so a single changed
    word always changes it; words that change or change places together do but for chance (2^-64). Not cryptographic.
    """
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.numel() % 8:
        raise ValueError(f"a contiguous uint8 tensor of 8n bytes is needed, got {buffer.dtype}, {buffer.numel()} bytes")
    words = buffer.view(-1).view(torch.int64)
    if buffer.is_cuda:
        from nemo_rl_lite.refit.checksum_kernel import sum_words

        return sum_words(words, every, _WORDS, _ODD)
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, words.numel(), every * _WORDS):
        chunk = words[start : start + _WORDS]
        position = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=buffer.device)
        mixed = (chunk ^ (chunk >> 31)) * (position * _ODD | 1)
        total += ((mixed ^ (mixed >> 29)) * _ODD).sum()
    return total
