"""A checksum of a buffer's bytes that is cheap on any device and changes when bytes change or move."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

_WORDS = 1 << 20
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio
Verify = Literal["off", "sample", "full"]

# One chunk in this many is verified, the first one included; 0 for none.
_EVERY: dict[Verify, int] = {"off": 0, "sample": 16, "full": 1}


def looked_at[Item](verify: Verify, items: Sequence[Item]) -> Sequence[Item]:
    """The items that are verified."""
    return items[:: _EVERY[verify]] if _EVERY[verify] else []


class Checksums:
    """Checksums of several buffers, computed on the buffers' device and read from it together, by `values`."""

    def __init__(self, verify: Verify):
        self._every = _EVERY[verify]
        self._sums: list[Tensor] = []

    def add(self, buffer: Tensor) -> None:
        """Add the checksum of a contiguous uint8 tensor whose length is a multiple of 8. Work that the device's current
        stream gets later may change the buffer.

        Raises:
            ValueError: another dtype, layout or length.
        """
        if self._every:
            self._sums.append(_sum(buffer, self._every))

    def values(self) -> list[int]:
        """One number for each buffer, in order; empty if nothing is verified."""
        return [number & (2**64 - 1) for number in torch.stack(self._sums).tolist()] if self._sums else []


def _sum(buffer: Tensor, every: int) -> Tensor:
    """The checksum of one chunk in `every`, a scalar on the buffer's device.

    It is the sum modulo 2^64 of the 64-bit words, each mixed with its position by invertible steps. A single changed
    word always changes the sum; words that change, or trade places, together leave it equal with probability 2^-64. It
    is not cryptographic.
    """
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.numel() % 8:
        raise ValueError(f"a contiguous uint8 tensor of 8n bytes is needed, got {buffer.dtype}, {buffer.numel()} bytes")
    words = buffer.view(-1).view(torch.int64)
    if buffer.is_cuda:
        from nemo_rl_lite.refit.transport.checksum_kernel import sum_words

        return sum_words(words, every, _WORDS, _ODD)
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, words.numel(), every * _WORDS):
        chunk = words[start : start + _WORDS]
        position = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=buffer.device)
        mixed = (chunk ^ _shifted(chunk, 31)) * (position * _ODD | 1)
        total += ((mixed ^ _shifted(mixed, 29)) * _ODD).sum()
    return total


def _shifted(words: Tensor, bits: int) -> Tensor:
    """`words` as unsigned numbers, shifted right: torch's own shift copies the sign, after which a word and its
    complement would mix to the same number."""
    return (words >> bits) & ((1 << 64 - bits) - 1)
