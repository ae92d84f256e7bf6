"""One number for the bytes of a buffer, cheap on any device, that changes when bytes change or move."""

import torch
from torch import Tensor

_WORDS = 1 << 20


def checksum(buffer: Tensor) -> int:
    """A 64-bit checksum of a contiguous uint8 tensor whose length is a multiple of 8.

    Sum of the 64-bit words, each times an odd number made from its position, modulo 2^64: any single changed word, and
    any two exchanged words that differ, change it. Not cryptographic.

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
        total += (chunk * (position * -7046029254386353131 | 1)).sum()
    return int(total.item()) & (2**64 - 1)
