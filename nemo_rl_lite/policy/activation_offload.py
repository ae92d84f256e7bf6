"""Fine-grained activation offload through megatron-core: chosen modules keep saved tensors in pinned host memory.

Copies out overlap with the forward pass, copies in with the backward pass. One manager in each process follows the
modules. It takes the first pass as the pattern of all later ones and offloads only what that pass had. So it must see
training passes alone, and start over where one has more micro-batches than any before.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.megatron import learn_pattern_again, micro_batches_in_pattern, offload_manager
from nemo_rl_lite.config.schema import MegatronConfig

# Without this variable, Transformer Engine >= 2.10 would offload by itself, weights included. It reads the variable
# while it is imported.
_ENVIRONMENT = {"NVTE_CPU_OFFLOAD_V1": "1"}
# megatron-core does not have this one of the `offload_modules`.
MLP = "mlp"
FUSED_EXPERTS = "fused_group_mlp"


def environment(config: MegatronConfig) -> dict[str, str]:
    """Return the variables that a policy process needs in its environment from its start."""
    return dict(_ENVIRONMENT) if config.fine_grained_activation_offloading else {}


def set_fields(provider: Any, config: MegatronConfig) -> None:
    """Set on megatron-bridge's provider, before it is finalized, which modules offload.

    Raises:
        RuntimeError: the process was started without `environment`.
    """
    if not config.fine_grained_activation_offloading:
        return
    missing = [f"{name}={value}" for name, value in _ENVIRONMENT.items() if os.environ.get(name) != value]
    if missing:
        raise RuntimeError(f"fine_grained_activation_offloading needs {', '.join(missing)} from a process' start")
    provider.fine_grained_activation_offloading = True
    # megatron-core does not know `mlp` and needs at least one name; attn_norm saves nothing under Transformer Engine.
    provider.offload_modules = [name for name in config.offload_modules or [] if name != MLP] or ["attn_norm"]
    provider.activation_offload_fraction = config.activation_offload_fraction
    if FUSED_EXPERTS in provider.offload_modules:
        provider.use_transformer_engine_op_fuser = True


def add_mlps(chunks: Sequence[Any], config: MegatronConfig) -> None:
    """Offload what MLPs without experts save, the largest part of such a layer; megatron-core has no such module."""
    if not config.fine_grained_activation_offloading or MLP not in (config.offload_modules or []):
        return
    from megatron.core.transformer.mlp import MLP as DenseMLP
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)]
    for layer in layers:
        if isinstance(layer.mlp, DenseMLP):
            watch(layer.mlp)


def watch(module: Any) -> None:
    """Offload what `module` saves, by megatron-core's manager; its first argument and first result are tensors."""
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
        # After an error there is no result.
        return None if result is None else group.group_offload(result)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


@contextmanager
def suspended(chunks: Sequence[Any]) -> Iterator[None]:
    """Suspend offload within the block, for passes without a backward pass.

    The manager would take such a pass as its pattern. It lacks core_attn, and a module that is missing from the pattern
    ends the offload of all modules.
    """
    configs = _configs(chunks)
    if not configs:
        yield
        return
    manager = offload_manager()
    # The first call hides the pass from models and schedules, the second from the modules.
    _set_all(configs, False)
    manager.disable_offload()
    try:
        yield
    finally:
        manager.enable_offload()
        _set_all(configs, True)


@contextmanager
def training_pass(chunks: Sequence[Any], micro_batches: int) -> Iterator[None]:
    """Wrap each training pass. The manager learns its pattern again where the pass has more micro-batches than any
    before; otherwise it would silently keep the additional ones on the device."""
    hooks = []
    if _configs(chunks) and micro_batches_in_pattern() < micro_batches:
        learn_pattern_again(HostBuffers())
        # While the manager learns, the backward pass fetches tensors without checking that they are on the host.
        hooks = [chunk.register_forward_hook(_wait_for_copies_out) for chunk in chunks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class HostBuffers:
    """Allocates pinned tensors from torch's cache, in place of megatron-core's pool.

    That pool keeps its tensors by shape. With packed or dynamic batches hardly two micro-batches have the same shape,
    so the host's memory would fill. The pool also reuses a tensor while a copy from it may be in flight.
    """

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def free(self, tensor: Tensor) -> None:
        """Do nothing: torch frees the tensor with its last reference."""

    def reset(self) -> None:
        """Do nothing: no tensors are kept."""


def _wait_for_copies_out(*_: Any) -> None:
    torch.cuda.current_stream().wait_stream(offload_manager().d2h_stream)


def _configs(chunks: Sequence[Any]) -> list[Any]:
    """Return the configurations in the model that have the feature on."""
    modules = (module for chunk in chunks for module in chunk.modules())
    own = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return [config for config in own.values() if getattr(config, "fine_grained_activation_offloading", False)]


def _set_all(configs: Sequence[Any], on: bool) -> None:
    for config in configs:
        config.fine_grained_activation_offloading = on
