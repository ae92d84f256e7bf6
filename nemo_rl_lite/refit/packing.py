"""Tensors into a bucket's bytes and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.plan import Bucket, Slot


def new_buffer(bucket: Bucket, device: torch.device) -> Tensor:
    """A zeroed buffer for one bucket (the padding is part of the checksum): uint8, [bucket.nbytes]."""
    return torch.zeros(bucket.nbytes, dtype=torch.uint8, device=device)


def pack(bucket: Bucket, tensors: Sequence[tuple[str, Tensor]], buffer: Tensor) -> None:
    """Copy named tensors (any device and layout) to their places in `buffer`.

    Raises:
        RefitError: the tensors are not those of the plan.
    """
    for slot, (name, tensor) in zip(bucket.slots, tensors, strict=True):
        found = (name, tuple(tensor.shape), dtype_name(tensor.dtype))
        if found != (slot.name, slot.shape, slot.dtype):
            planned = f"{slot.name} {list(slot.shape)} {slot.dtype}"
            raise RefitError(f"the plan expects {planned}, the model gave {found[0]} {list(found[1])} {found[2]}")
        view(buffer, slot).copy_(tensor)


def unpack(bucket: Bucket, buffer: Tensor) -> list[tuple[str, Tensor]]:
    """Named views into `buffer`, no copies."""
    return [(slot.name, view(buffer, slot)) for slot in bucket.slots]


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """The slot's bytes as a tensor of its dtype and shape."""
    return buffer[slot.offset : slot.offset + slot.nbytes].view(getattr(torch, slot.dtype)).view(slot.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
