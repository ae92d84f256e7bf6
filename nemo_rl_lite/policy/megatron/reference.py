"""The reference policy: the starting weights, kept in host memory and lent to the model for a forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nemo_rl_lite.policy.megatron.model import MegatronModel


class ReferenceWeights:
    """A copy of a model's weights at the time of construction."""

    def __init__(self, model: MegatronModel):
        self._model = model
        self._weights = _copies(model)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has the reference weights; afterwards, also after an error, its own again."""
        own = _copies(self._model)
        try:
            _fill(self._model, self._weights)
            yield
        finally:
            _fill(self._model, own)


def _copies(model: MegatronModel) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]


def _fill(model: MegatronModel, weights: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
