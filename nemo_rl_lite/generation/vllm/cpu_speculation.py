"""Repairs of two functions with which vLLM's CPU build (0.24) verifies drafts; its GPU kernels are right.

One is called with an argument that it does not take (fixed upstream by vllm-project/vllm#46069). The other writes a
request's temperature, top p or top k into a copy, where these are no 64-bit integers, so that tokens are drawn from
another distribution than the one asked for.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def repair() -> None:
    """Put working functions in their places, before an engine starts in this process."""
    from vllm.utils import cpu_triton_utils as kernels

    kernels.expand_kernel.func = _expand
    recovered = kernels.sample_recovered_tokens_kernel
    if not isinstance(recovered.func, _WithoutPrecision):
        recovered.func = _WithoutPrecision(recovered.func)


class _WithoutPrecision:
    """The function, called without the argument that only GPUs know."""

    def __init__(self, function: Callable[..., None]):
        self._function = function

    def __call__(self, *args: Any, USE_FP64_GUMBEL: bool = False, **named: Any) -> None:
        self._function(*args, **named)


def _expand(
    output_N: Tensor,
    input_B: Tensor,
    ends_B: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each request's value to its draft tokens, which end before `ends_B`; `replace_to` for `replace_from`."""
    values_B = input_B.masked_fill(input_B == replace_from, replace_to)
    output_N.copy_(values_B.repeat_interleave(ends_B.diff(prepend=ends_B.new_zeros(1))))
