"""The reference policy: the starting weights, kept in host memory and swapped into the model for a forward pass; or
the model without its adapters."""

from collections.abc import Iterator
from contextlib import contextmanager

from nemo_rl_lite.config.sections.policy import PolicyConfig
from nemo_rl_lite.offload.arena import HostArena, Registrar
from nemo_rl_lite.offload.host_copy import HostCopy
from nemo_rl_lite.policy.megatron.lora import WithoutAdapters
from nemo_rl_lite.policy.megatron.memory import host_registrar
from nemo_rl_lite.policy.megatron.model import MegatronModel


class ReferenceWeights:
    """A copy of a model's weights and buffers at the time of construction. Page-locked where there is a `registrar`."""

    def __init__(self, model: MegatronModel, registrar: Registrar | None):
        self._starting, self._own = (
            HostCopy(model.state, HostArena(purpose, registrar), model.device)
            for purpose in ("the reference policy's weights", "the policy's weights while it has the reference's")
        )
        self._starting.take()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has the reference weights; afterwards, also after an error, its own again."""
        self._own.take()
        try:
            self._starting.put()
            yield
        finally:
            self._own.put()


Reference = ReferenceWeights | WithoutAdapters


def kept_reference(config: PolicyConfig, model: MegatronModel) -> Reference:
    """The reference policy of a model that has the starting weights now."""
    if model.lora is not None:
        return WithoutAdapters(model.chunks, model.lora)
    return ReferenceWeights(model, host_registrar(config, model))
