"""LoRA adapters that vLLM applies itself: one adapter, the policy's, which each refit replaces in place."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.config.schema import LoraConfig
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.layout.packing import Arrived
from nemo_rl_lite.refit.transport.interface import Loader, Receiver
from nemo_rl_lite.refit.transport.report import RefitReport

# vLLM's number for the adapter, and the name that stands where it expects a folder. Nothing is read from there, since
# the adapter is known before the first request.
_NUMBER, _NAME = 1, "policy"
# The ranks for which vLLM has kernels.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
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
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.dim),
        "fully_sharded_loras": ranks > 1,
        "lora_target_modules": [part for name in lora.target_modules for part in _PARTS[name]],
    }


def adapter_request() -> Any:
    """vLLM's name for the adapter, which each request carries."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=_NAME, lora_int_id=_NUMBER, lora_path=_NAME)


class AdapterLoader(Loader):
    """Puts the matrices of all adapters where vLLM's layers read them, which captured graphs know, too."""

    def __init__(self, manager: Any, scaling: float):
        """`manager`: vLLM's `LoRAModelManager`. `scaling`: the factor of what an adapter adds to a layer's output."""
        from vllm.lora.lora_model import LoRAModel

        self._manager, self._scaling = manager, scaling
        self._arrived: dict[str, Tensor] = {}
        # Without matrices of its own, so that the layers' memory is all that the adapter takes.
        manager.remove_all_adapters()
        manager.add_adapter(LoRAModel(_NUMBER, manager.lora_config.max_lora_rank, {}))
        manager.activate_adapter(_NUMBER)
        manager._last_mapping = None
        self._slot = manager.lora_index_to_id.index(_NUMBER)

    def receive(self, receiver: Receiver) -> RefitReport:
        """Receive all adapters and put them in their places.

        Raises:
            RefitError: an adapter of a layer that has none in vLLM, or a layer of vLLM's that got none.
        """
        self._arrived = {}
        report = receiver.receive(self)
        self._place(self._by_layer())
        self._arrived = {}
        if self._manager.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return report

    def fill(self, arrived: Arrived) -> None:
        """See `Loader.fill`. The parts of a layer may come in several buckets, so that all are kept until the end."""
        kept = Arrived(arrived.index, arrived.bucket, arrived.buffer.clone())
        self._arrived |= dict(kept.named())

    def _by_layer(self) -> dict[str, dict[str, Tensor]]:
        """A and B, with the scaling, by the names of layers, as vLLM names them."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._arrived.items():
            layer, is_first = parse_fine_tuned_lora_name(name, mapper)
            layers.setdefault(layer, {})["A" if is_first else "B"] = tensor
        if self._scaling != 1:
            torch._foreach_mul_([own["B"] for own in layers.values()], self._scaling)
        return layers

    def _place(self, layers: Mapping[str, Mapping[str, Tensor]]) -> None:
        missing, left = list[str](), set(layers)
        for name, module in self._manager.modules.items():
            parts = self._manager.packed_modules.get(name)
            names = [name] if parts is None else parts
            missing += [one for one in names if one not in layers]
            if missing:
                continue
            firsts, seconds = ([layers[one][which] for one in names] for which in "AB")
            module.set_lora(self._slot, *((firsts[0], seconds[0]) if parts is None else (firsts, seconds)))
            left -= set(names)
        if missing or left:
            what = f"{missing[0]} of the engine got no adapter" if missing else f"the engine cannot adapt {min(left)}"
            raise RefitError(f"{what}; set generation.vllm_cfg.lora=merged")
