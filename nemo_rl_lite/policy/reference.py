"""Reference policy of a rank: the model without adapters, or weights in host memory that may follow the policy's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nemo_rl_lite.config.schema import PolicyConfig
from nemo_rl_lite.offload.host_memory import HostArena
from nemo_rl_lite.offload.mover import HostCopy
from nemo_rl_lite.policy.memory import host_registrar
from nemo_rl_lite.policy.model import MegatronModel


class Reference:
    """Reference policy with the starting weights of a model. All weights must be on the device when it is used."""

    def __init__(self, config: PolicyConfig, model: MegatronModel):
        """Keep the model's weights, unless it has adapters. Raises HostMemoryError: host memory is too small."""
        self._model, self.has_moved = model, False
        registrar = host_registrar(config, model)
        self._kept, self._own = (
            HostCopy(model.state, HostArena(purpose, registrar), model.device)
            for purpose in (
                "the reference policy's weights",
                "the policy's weights during the reference policy's passes",
            )
        )
        if model.lora is None:
            self._kept.take()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the model the reference policy within the block."""
        if self._model.lora is not None:
            with self._model.lora.disable_adapter(self._model.chunks):
                yield
            return
        self._own.take()
        try:
            self._kept.put()
            yield
        finally:
            self._own.put()

    def follow(self, share: float) -> None:
        """Set the weights to `share` x policy + (1 - `share`) x reference (Gorbatovski et al. 2024, arXiv:2404.09656).
        The model has no adapters."""
        self._kept.blend(share)
        self.has_moved = True

    def sharded_state(self) -> dict[str, Any]:
        """Return copies of the weights on the host, as megatron-core's sharded tensors with a prefix."""
        from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

        state = {}
        with self.in_place():
            for index, chunk in enumerate(self._model.bare_chunks):
                tensors = chunk.sharded_state_dict()
                add_prefix_for_sharding(tensors, "reference.")
                for one in tensors.values():
                    if isinstance(getattr(one, "data", None), Tensor):
                        one.data = one.data.detach().to("cpu", copy=True)
                state[f"reference{index}"] = tensors
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Take over weights that were read into a `sharded_state`."""
        self._own.take()
        try:
            for index, chunk in enumerate(self._model.bare_chunks):
                chunk.load_state_dict(state[f"reference{index}"])
            self._kept.take()
        finally:
            self._own.put()
        self.has_moved = True
