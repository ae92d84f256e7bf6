"""Batches and rows from tensors, for tests of losses."""

import torch
from torch import Tensor

from nemo_rl_lite.losses.batch import Batch, TokenRow


def batch_of(tensors: dict[str, Tensor]) -> Batch:
    """A batch with these fields, among them a mask; `logprobs`, which are no field, may be there too."""
    shape = tensors["mask"].shape
    own = {"tokens": torch.zeros(shape, dtype=torch.int64), "lengths": torch.full(shape[:1], shape[1])}
    return Batch(**(own | {name: values for name, values in tensors.items() if name != "logprobs"}))


def rows_of(mask_BT: Tensor) -> list[TokenRow]:
    return [TokenRow([0] * len(mask), (mask > 0).tolist()) for mask in mask_BT]
