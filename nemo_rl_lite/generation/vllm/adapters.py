"""LoRA adapters that vLLM applies itself: one adapter, the policy's, which each refit replaces in place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_rl_lite.compat.torch import foreach_mul
from nemo_rl_lite.config.engines import VLLM_LORA_RANKS
from nemo_rl_lite.config.sections.policy import LoraConfig
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.layout.packing import Named

# vLLM's number for the adapter, and the name that stands where it expects a folder. Nothing is read from there, since
# the adapter is known before the first request. It is the only one, and so in the first slot.
_NUMBER, _NAME, _SLOT = 1, "policy", 0
# Hugging Face's names for the layers which Megatron's are made of.
_PARTS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def engine_options(lora: LoraConfig, ranks: int) -> dict[str, Any]:
    """vLLM's options for an engine on `ranks` GPUs that applies adapters to the layers to which the policy has them."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in VLLM_LORA_RANKS if rank >= lora.dim and rank % ranks == 0),
        "fully_sharded_loras": ranks > 1,
        "lora_target_modules": [part for name in lora.target_modules for part in _PARTS[name]],
    }


def adapter_request() -> Any:
    """vLLM's name for the adapter, which each request carries."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=_NAME, lora_int_id=_NUMBER, lora_path=_NAME)


@dataclass(frozen=True)
class _Part:
    """A layer of the checkpoint, as a part of one of vLLM's layers, which may compute several together."""

    layer: Any
    index: int
    parts: int
    packed: bool

    def target(self, first: bool) -> Tensor:
        """The memory of A [rank, inputs], which is `first`, or of B [outputs, rank]; with the largest rank."""
        return (self.layer.lora_a_stacked if first else self.layer.lora_b_stacked)[self.index][_SLOT, 0]

    def own(self, first: bool, tensor: Tensor) -> Tensor:
        """What this rank of a tensor-parallel engine has of A or B."""
        if self.layer.tp_size == 1:
            return tensor
        slicing = self.layer.slice_lora_a if first else self.layer.slice_lora_b
        if not self.packed:
            return slicing(tensor)
        return slicing([tensor if index == self.index else None for index in range(self.parts)])[self.index]


class AdapterSlot:
    """The memory in which vLLM's layers read the adapter's matrices, as captured graphs do, too."""

    def __init__(self, manager: Any, scaling: float):
        """`manager`: vLLM's `LoRAModelManager`, of an engine that may sleep. `scaling`: the factor of what an adapter
        adds to a layer's output.

        Raises:
            RefitError: vLLM computes a layer of the model in a way that is not known here.
        """
        self._manager, self._scaling = manager, scaling
        self._mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        self._is_taken = False
        self._parts = dict(_parts(manager))
        self.wanted = {f"{name}.{which}" for name in self._parts for which in "AB"}
        """The matrices that vLLM applies, as `load` reports them."""

    @property
    def memory(self) -> list[Tensor]:
        return [part.target(first) for part in self._parts.values() for first in (True, False)]

    def take(self) -> None:
        """Have vLLM know the adapter, and clear its memory, before the first refit; the engine is awake."""
        if self._is_taken:
            return
        # vLLM keeps what an adapter is loaded from, here zeros of rank 1, which are not looked at again.
        self._manager.remove_all_adapters()
        self._manager.add_adapter(self._manager.create_dummy_lora(_NUMBER, 1, {}))
        self._manager.activate_adapter(_NUMBER)
        self._is_taken = True

    def load(self, named: Sequence[Named]) -> set[str]:
        """Put A's and B's, named as peft names them, in their places; returns which have come.

        Raises:
            RefitError: vLLM has no such layer.
        """
        from vllm.lora.utils import parse_fine_tuned_lora_name

        filled = set()
        for name, tensor in named:
            layer, first = parse_fine_tuned_lora_name(name, self._mapper)
            if layer not in self._parts:
                raise RefitError(f"vLLM applies no adapter to {layer}; set generation.vllm_cfg.lora=merged")
            part = self._parts[layer]
            own = part.own(first, tensor)
            # Ranks share out all dimensions that vLLM has memory for, and the last may have none of the adapter's.
            if own.numel():
                part.target(first)[: own.shape[0], : own.shape[1]].copy_(own)
            filled.add(f"{layer}.{'A' if first else 'B'}")
        return filled

    def scale(self) -> None:
        """Apply the scaling to what has been loaded; vLLM has none when it computes."""
        if self._scaling != 1:
            foreach_mul([part.target(False) for part in self._parts.values()], self._scaling)


def _parts(manager: Any) -> Iterator[tuple[str, _Part]]:
    for name, layer in manager.modules.items():
        packed = manager.packed_modules.get(name)
        names = [name] if packed is None else packed
        if len(names) != layer.n_slices:
            raise RefitError(
                f"vLLM adapts {name} in {layer.n_slices} parts, the checkpoint has {len(names)}; set "
                "generation.vllm_cfg.lora=merged"
            )
        for index, part in enumerate(names):
            yield part, _Part(layer, index, len(names), packed is not None)
