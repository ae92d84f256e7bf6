"""One number for the bytes of a buffer, cheap on any device, that changes when bytes change or move."""

import torch
from torch import Tensor

_WORDS = 1 << 20
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio


def checksum(buffer: Tensor) -> int:
    """A 64-bit checksum of a contiguous uint8 tensor whose length is a multiple of 8.

    Sum modulo 2^64 of the 64-bit words, each mixed with its position by steps that can be undone, so a single changed
    word always changes it; words that change or change places together do but for chance (2^-64). Not cryptographic.

    Raises:
        ValueError: another dtype, layout or length.
    """
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.numel() % 8:
        raise ValueError(f"a contiguous uint8 tensor of 8n bytes is needed, got {buffer.dtype}, {buffer.numel()} bytes")
    words = buffer.view(-1).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, words.numel(), _WORDS):
        chunk = words[start : start + _WORDS]
        position = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=buffer.device)
        mixed = (chunk ^ (chunk >> 31)) * (position * _ODD | 1)
        total += ((mixed ^ (mixed >> 29)) * _ODD).sum()
    return int(total.item()) & (2**64 - 1)
