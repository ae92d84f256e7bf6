"""Triton kernel of the checksum in interface.py. Import it only on machines with a GPU."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _add_up(words, total, count, every, CHUNK: tl.constexpr, ODD: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    blocks_a_chunk: tl.constexpr = CHUNK // BLOCK
    chunk = block // blocks_a_chunk * every
    position = chunk * CHUNK + block % blocks_a_chunk * BLOCK + tl.arange(0, BLOCK)
    # 0 mixes to 0.
    word = tl.load(words + position, mask=position < count, other=0)
    # See `interface._sum`.
    mixed = (word ^ ((word >> 31) & 0x1FFFFFFFF)) * ((position * ODD) | 1)
    tl.atomic_add(total, tl.sum((mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * ODD, axis=0))


def sum_words(words: Tensor, every: int, chunk: int, odd: int) -> Tensor:
    """Return the checksum of `words`, int64 [n], an int64 scalar on the same device, from each `every`-th chunk of
    `chunk` words."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    chunks = -(-words.numel() // chunk)
    verified = -(-chunks // every)
    if verified:
        launch: Any = _add_up[(verified * (chunk // _BLOCK),)]
        launch(words, total, words.numel(), every, CHUNK=chunk, ODD=odd, BLOCK=_BLOCK)
    return total
