"""Fine-grained activation offload, by megatron-core: chosen modules keep saved tensors in pinned host memory.

Copies to the host overlap with the forward pass, copies to the device with the backward pass. A manager per process
takes the first pass as the pattern for later ones. So it must see only training passes, and start again when one
has more micro-batches than any before.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.megatron import learn_pattern_again, micro_batches_in_pattern, offload_manager
from nemo_rl_lite.config.schema import MegatronConfig

# Disables offload by Transformer Engine >= 2.10, which would include weights. It reads the variable during its import.
_ENVIRONMENT = {"NVTE_CPU_OFFLOAD_V1": "1"}
# An entry of `offload_modules` that megatron-core lacks.
MLP = "mlp"
FUSED_EXPERTS = "fused_group_mlp"


def environment(config: MegatronConfig) -> dict[str, str]:
    """Return environment variables for the start of a policy process."""
    return dict(_ENVIRONMENT) if config.fine_grained_activation_offloading else {}


def set_fields(provider: Any, config: MegatronConfig) -> None:
    """Set the modules that offload, on megatron-bridge's provider before it is finalized. Raises RuntimeError: the
    process was started without `environment`."""
    if not config.fine_grained_activation_offloading:
        return
    missing = [f"{name}={value}" for name, value in _ENVIRONMENT.items() if os.environ.get(name) != value]
    if missing:
        raise RuntimeError(f"fine_grained_activation_offloading needs {', '.join(missing)} from a process' start")
    provider.fine_grained_activation_offloading = True
    # megatron-core needs at least one name; attn_norm saves nothing with Transformer Engine.
    provider.offload_modules = [name for name in config.offload_modules or [] if name != MLP] or ["attn_norm"]
    provider.activation_offload_fraction = config.activation_offload_fraction
    if FUSED_EXPERTS in provider.offload_modules:
        provider.use_transformer_engine_op_fuser = True


def add_mlps(chunks: Sequence[Any], config: MegatronConfig) -> None:
    """Offload saved tensors of MLPs without experts, the largest part of such a layer."""
    if not config.fine_grained_activation_offloading or MLP not in (config.offload_modules or []):
        return
    from megatron.core.transformer.mlp import MLP as DenseMLP
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for layer in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, DenseMLP):
            watch(layer.mlp)


def watch(module: Any) -> None:
    """Let megatron-core's manager offload a module's saved tensors; its first argument and result are tensors."""
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
        # The result is None after an error.
        return None if result is None else group.group_offload(result)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


@contextmanager
def suspended(chunks: Sequence[Any]) -> Iterator[None]:
    """Suspend offload within the block, for passes without a backward pass.

    The manager would take such a pass as its pattern. The pattern would lack core_attn, which would end the offload of
    all modules.
    """
    configs = _configs(chunks)
    if not configs:
        yield
        return
    manager = offload_manager()
    # The first line hides the pass from models and schedules, the second from modules.
    _set_all(configs, False)
    manager.disable_offload()
    try:
        yield
    finally:
        manager.enable_offload()
        _set_all(configs, True)


@contextmanager
def training_pass(chunks: Sequence[Any], micro_batches: int) -> Iterator[None]:
    """Wrap each training pass. If it has more micro-batches than any before, the manager learns its pattern again, or
    the additional micro-batches would silently stay on the device."""
    hooks = []
    if _configs(chunks) and micro_batches_in_pattern() < micro_batches:
        learn_pattern_again(HostBuffers())
        # While the manager learns, the backward pass does not wait for copies to the host.
        hooks = [chunk.register_forward_hook(_wait_for_copies_out) for chunk in chunks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def forget_pass(chunks: Sequence[Any]) -> None:
    """Let the manager start again without the tensors of a pass that has not ended."""
    if _configs(chunks):
        learn_pattern_again(HostBuffers())


class HostBuffers:
    """Pinned tensors from torch's cache, which replace megatron-core's pool.

    The pool keeps tensors by shape. Packed or dynamic micro-batches have many shapes, so it would fill host memory. It
    also reuses tensors while copies from them may be in flight.
    """

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def free(self, tensor: Tensor) -> None:
        """Do nothing: torch frees a tensor with its last reference."""

    def reset(self) -> None: ...


def _wait_for_copies_out(*_: Any) -> None:
    torch.cuda.current_stream().wait_stream(offload_manager().d2h_stream)


def _configs(chunks: Sequence[Any]) -> list[Any]:
    """Return the model's configurations with offload enabled."""
    modules = (module for chunk in chunks for module in chunk.modules())
    own = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return [config for config in own.values() if getattr(config, "fine_grained_activation_offloading", False)]


def _set_all(configs: Sequence[Any], on: bool) -> None:
    for config in configs:
        config.fine_grained_activation_offloading = on
