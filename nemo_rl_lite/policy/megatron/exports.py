"""What a refit exports, under Hugging Face names, by megatron-bridge: all weights, or the adapters of LoRA alone."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from nemo_rl_lite.compat import bridge
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.refit.layout.packing import Named


class Exported(Protocol):
    """One kind of export. Both methods are collective."""

    def tasks(self) -> list[Any]:
        """The bridge's conversion tasks, the same on every rank and made for the caller; each has a parameter,
        `param_weight`, which is None on ranks without it."""
        ...

    def export(self, tasks: Iterable[Any]) -> Iterable[Named]:
        """The tensors that these tasks give; the same on every rank."""
        ...


class Weights:
    """All weights, with adapters merged into them."""

    def __init__(self, model: MegatronModel):
        self._model = model

    def tasks(self) -> list[Any]:
        return self._model.bridge.get_conversion_tasks(self._model.chunks)

    def export(self, tasks: Iterable[Any]) -> Iterable[Named]:
        on_cpu = self._model.device.type == "cpu"
        return self._model.bridge.export_hf_weights(
            self._model.chunks, cpu=on_cpu, show_progress=False, conversion_tasks=tasks
        )


class Adapters:
    """The matrices of all adapters, named as peft names them: `....q_proj.lora_A.weight` [rank, inputs] and
    `....lora_B.weight` [outputs, rank]. Layers that Megatron fuses have one adapter, of which all of their parts get
    the same A and rows of B."""

    def __init__(self, model: MegatronModel):
        self._model = model
        # Each is made of two tasks, for A and B.
        self._adapters: list[Any] = []

    def tasks(self) -> list[Any]:
        self._adapters = bridge.adapter_conversions(self._model.bridge, self._model.chunks)
        return [task for one in self._adapters for task in (one.linear_in_task, one.linear_out_task)]

    def export(self, tasks: Iterable[Any]) -> Iterable[Named]:
        """`tasks`: in the order of `tasks()`."""
        pairs = zip(*[iter(tasks)] * 2, strict=True)
        adapters = [
            replace(adapter, linear_in_task=first, linear_out_task=second)
            for adapter, (first, second) in zip(self._adapters, pairs, strict=True)
        ]
        on_cpu = self._model.device.type == "cpu"
        return bridge.export_adapters(self._model.bridge, self._model.chunks, adapters, on_cpu)
