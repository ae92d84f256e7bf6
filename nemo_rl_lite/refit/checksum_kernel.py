"""The checksum of interface.py in one pass over the GPU's memory, by Triton.

Import this only where there is a GPU, because Triton compiles for one.
"""

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
    # Words beyond the end are loaded as 0, which mixes to 0.
    word = tl.load(words + position, mask=position < count, other=0)
    # The masks make the shifts logical: without them a word and its complement mix to the same number.
    mixed = (word ^ ((word >> 31) & 0x1FFFFFFFF)) * ((position * ODD) | 1)
    tl.atomic_add(total, tl.sum((mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * ODD, axis=0))


def sum_words(words: Tensor, every: int, chunk: int, odd: int) -> Tensor:
    """Return the checksum of `words`, int64 [n], from one chunk of `chunk` words in `every`: an int64 scalar on the
    same device."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    chunks = -(-words.numel() // chunk)
    verified = -(-chunks // every)
    if verified:
        launch: Any = _add_up[(verified * (chunk // _BLOCK),)]
        launch(words, total, words.numel(), every, CHUNK=chunk, ODD=odd, BLOCK=_BLOCK)
    return total
