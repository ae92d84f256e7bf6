"""The reference policy: the starting weights, kept in host memory and lent to the model for a forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nemo_rl_lite.policy.megatron.model import MegatronModel


class ReferenceWeights:
    """A copy of a model's weights at the time of construction, page-locked where the model is on a GPU."""

    def __init__(self, model: MegatronModel):
        self._model = model
        self._weights = [_host_copy(parameter) for parameter in model.parameters()]
        self._own: list[Tensor] | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has the reference weights; afterwards, also after an error, its own again."""
        parameters = self._model.parameters()
        if self._own is None:
            self._own = [_host_copy(parameter) for parameter in parameters]
        else:
            _fill(self._own, parameters)
        _settle(self._model)
        try:
            _fill(parameters, self._weights)
            yield
        finally:
            _fill(parameters, self._own)
            # The next step overwrites the host copies.
            _settle(self._model)


def _host_copy(parameter: Tensor) -> Tensor:
    copy = torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.is_cuda)
    return copy.copy_(parameter.detach())


@torch.no_grad()
def _fill(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _settle(model: MegatronModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
