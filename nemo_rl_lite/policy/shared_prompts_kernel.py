"""Triton kernel that adds gradients of copied keys and values. Import it only on machines with a GPU."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _add_rows(gradient, order, begins, total, width, BLOCK: tl.constexpr):
    """Add the rows of a token's copies, in a block of columns."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    added = tl.zeros([BLOCK], dtype=tl.float32)
    for place in range(tl.load(begins + token), tl.load(begins + token + 1)):
        row = tl.load(order + place)
        added += tl.load(gradient + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + token * width + column, added, mask=inside)


def add_rows(gradient_KW: Tensor, order_K: Tensor, begins: Tensor) -> Tensor:
    """Return [N, W]: the sum of each token's rows of `gradient_KW`, added in float32 and rounded once.

    `order_K`, int64: rows in the order of tokens. `begins`, int64 [N + 1]: where each token's begin.
    """
    tokens, width = len(begins) - 1, gradient_KW.shape[1]
    total_NW = torch.empty(tokens, width, dtype=gradient_KW.dtype, device=gradient_KW.device)
    launch: Any = _add_rows[(tokens, triton.cdiv(width, _BLOCK))]
    launch(gradient_KW.contiguous(), order_K, begins, total_NW, width, BLOCK=min(_BLOCK, triton.next_power_of_2(width)))
    return total_NW
