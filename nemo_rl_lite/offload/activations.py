"""Fine-grained activation offload through megatron-core: what chosen modules keep for the backward pass waits in
page-locked host memory, on its way out beside the forward pass and on its way in beside the backward pass.

One manager a process follows the modules. It takes the first pass it sees as the pattern of all later ones: what it
was not shown then it does not offload. So it must see training passes alone, and begin again where one has more
micro-batches than any before.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.config.schema import MegatronConfig

# Transformer Engine >= 2.10 would otherwise offload on its own account, weights included. It is read while that is
# imported.
_ENVIRONMENT = {"NVTE_CPU_OFFLOAD_V1": "1"}
# Of `offload_modules`, the one that megatron-core does not have.
MLP = "mlp"


def environment(config: MegatronConfig) -> dict[str, str]:
    """What a policy process needs in its environment from its start."""
    return dict(_ENVIRONMENT) if config.fine_grained_activation_offloading else {}


def set_fields(provider: Any, config: MegatronConfig) -> None:
    """Tell megatron-bridge's provider, before it is finalized, which modules offload what they keep.

    Raises:
        RuntimeError: the process was started without `environment`.
    """
    if not config.fine_grained_activation_offloading:
        return
    missing = [f"{name}={value}" for name, value in _ENVIRONMENT.items() if os.environ.get(name) != value]
    if missing:
        raise RuntimeError(f"fine_grained_activation_offloading needs {', '.join(missing)} from a process' start")
    provider.fine_grained_activation_offloading = True
    # megatron-core does not know `mlp`, and wants at least one name; Transformer Engine leaves attn_norm nothing of its
    # own.
    provider.offload_modules = [name for name in config.offload_modules or [] if name != MLP] or ["attn_norm"]
    provider.activation_offload_fraction = config.activation_offload_fraction


def add_mlps(chunks: Sequence[Any], config: MegatronConfig) -> None:
    """Offload what MLPs without experts keep, the largest part of such a layer and none of megatron-core's modules."""
    if not config.fine_grained_activation_offloading or MLP not in (config.offload_modules or []):
        return
    from megatron.core.transformer.mlp import MLP as DenseMLP
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)]
    for layer in layers:
        if isinstance(layer.mlp, DenseMLP):
            watch(layer.mlp)


def watch(module: Any) -> None:
    """Let megatron-core's manager offload what `module` keeps; its first argument and first result are tensors."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as Group,
    )

    groups: list[Any] = []

    def begin(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        groups.append(Group(module.config.fine_grained_activation_offloading, arguments[0], MLP))
        return (groups[-1].__enter__(), *arguments[1:])

    def end(_: Any, __: Any, result: Any) -> Any:
        group = groups.pop()
        group.__exit__()
        # After an error there is none.
        return None if result is None else group.group_offload(result)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


@contextmanager
def suspended(chunks: Sequence[Any]) -> Iterator[None]:
    """Within the block nothing is offloaded and the manager sees nothing: for passes without a backward pass.

    It would take them for its pattern; core_attn takes no part in them, and whatever is not in the pattern ends the
    offload for all modules.
    """
    configs = _configs(chunks)
    if not configs:
        yield
        return
    manager = _manager_class().get_instance()
    # The first keeps models and schedules from telling the manager of a pass, the second its modules.
    _set_all(configs, False)
    manager.disable_offload()
    try:
        yield
    finally:
        manager.enable_offload()
        _set_all(configs, True)


@contextmanager
def training_pass(chunks: Sequence[Any], micro_batches: int) -> Iterator[None]:
    """Around each pass that ends in gradients. Where it has more micro-batches than any before, the manager learns its
    pattern anew: of a pass that goes beyond the pattern it would keep the rest on the device, without a word."""
    hooks = []
    if _configs(chunks) and len(_manager_class().get_instance()._cached_chunks_forward) < micro_batches:
        _manager_class().reset_instance()
        _manager_class().get_instance()._cpu_tensor_pool = HostBuffers()
        # While it learns, the backward pass fetches what it needs without asking whether it has arrived on the host.
        hooks = [chunk.register_forward_hook(_wait_for_copies_out) for chunk in chunks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class HostBuffers:
    """Page-locked tensors from torch's own cache, in place of megatron-core's pool.

    That pool keeps what it has made for each shape, and with packed or dynamic batches hardly two micro-batches have
    the same: the host's memory would fill. It also lends a tensor out again while a copy from it may be under way;
    torch's cache waits for that.
    """

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def free(self, tensor: Tensor) -> None:
        """Nothing to do: it is free when nobody has it any more."""

    def reset(self) -> None:
        """Nothing to do: nothing is kept."""


def _wait_for_copies_out(*_: Any) -> None:
    torch.cuda.current_stream().wait_stream(_manager_class().get_instance().d2h_stream)


def _configs(chunks: Sequence[Any]) -> list[Any]:
    """The configurations in the model that have the feature on."""
    modules = (module for chunk in chunks for module in chunk.modules())
    own = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return [config for config in own.values() if getattr(config, "fine_grained_activation_offloading", False)]


def _set_all(configs: Sequence[Any], on: bool) -> None:
    for config in configs:
        config.fine_grained_activation_offloading = on


def _manager_class() -> Any:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    return PipelineOffloadManager
