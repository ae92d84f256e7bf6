"""Makes FlashAttention 4 work in verl's workers, which import this module (`model.external_lib`).

FlashAttention 4 takes the longest length of a batch as an integer. transformers 5 passes a tensor.
"""

from typing import Any

from torch import Tensor
from transformers import modeling_flash_attention_utils as flash

_last: tuple[Tensor, Any] | None = None


def integer_lengths(position_ids: Tensor, find: Any = flash.prepare_fa_kwargs_from_position_ids) -> Any:
    """Return the offsets of sequences and the longest length, for query and key each.

    Layers of a pass share the position ids, so the device is waited for once a pass.
    """
    global _last
    if _last is None or _last[0] is not position_ids:
        offsets, longest = find(position_ids)
        _last = position_ids, (offsets, tuple(map(int, longest)))
    return _last[1]


flash.prepare_fa_kwargs_from_position_ids = integer_lengths
