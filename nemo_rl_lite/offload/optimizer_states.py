"""Collect the tensors that an optimizer holds in addition to the model: master weights and states."""

from collections.abc import Iterable

import torch
from torch import Tensor

from nemo_rl_lite.compat.torch import storage_id


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer], model: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that the optimizers step and their states, without those that share memory with `model`: an
    optimizer without master weights steps the model's tensors."""
    own = {storage_id(tensor) for tensor in model}
    return [tensor for tensor in _held(optimizers) if storage_id(tensor) not in own]


def _held(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
