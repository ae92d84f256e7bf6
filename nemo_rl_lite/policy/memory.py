"""Memory of a policy rank: components that `offload/` moves, caches of modules."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import psutil
import torch
from torch import Tensor

from nemo_rl_lite.compat.megatron import chained
from nemo_rl_lite.compat.torch import free_host_cache
from nemo_rl_lite.compat.transformer_engine import places_of_ranks, places_of_sequences
from nemo_rl_lite.config.schema import PolicyConfig
from nemo_rl_lite.offload.host_memory import CudaRegistrar, HostArena
from nemo_rl_lite.offload.mover import Movable
from nemo_rl_lite.offload.phases import GradientBuffers, PhaseMemory, optimizer_tensors
from nemo_rl_lite.offload.residency import Component, Residency
from nemo_rl_lite.policy.model import MegatronModel

log = logging.getLogger(__name__)

# Segments of torch's cache that are worth a line in the log.
_LARGE_BYTES = 256 << 20
# Share of a GPU's memory that libraries may keep when a model is gone, such as Transformer Engine's gradient buffers.
_LIBRARY_SHARE = 0.05
GIB, MIB = 2**30, 2**20


def phase_memory(config: PolicyConfig, model: MegatronModel, optimizer: Any, residency: Residency) -> PhaseMemory:
    """Make this rank's parameters, gradients and optimizer states movable."""
    device, registrar, gradients = model.device, host_registrar(config, model), gradient_buffers(model)

    def states() -> list[Tensor]:
        return optimizer_tensors(torch_optimizers(optimizer), [*model.parameters(), *gradients])

    return PhaseMemory(
        residency,
        Movable("parameters", model.own_parameters, HostArena("parameters", registrar), device),
        Movable("optimizer_states", states, HostArena("optimizer states", registrar), device),
        GradientBuffers(gradients),
        overlap=config.overlap_offload,
        device=GPUMemory() if device.type == "cuda" else CPUMemory(),
    )


def host_registrar(config: PolicyConfig, model: MegatronModel) -> CudaRegistrar | None:
    """Return the registrar that pins host memory for offload; None if disabled or on a CPU."""
    return CudaRegistrar() if config.use_pinned_optimizer_offload and model.device.type == "cuda" else None


def require_weights(model: MegatronModel, phases: PhaseMemory) -> None:
    """Gather parameters that other ranks have updated. Collective. Raises RuntimeError: they are not on the device."""
    phases.require(Component.PARAMETERS)
    model.gather.complete()


def gradient_buffers(model: MegatronModel) -> list[Tensor]:
    """Return the flat tensors that hold this rank's gradients."""
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return [buffer.grad_data for buffer in buffers]


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers inside a megatron-core optimizer, chained or not."""
    return [part.optimizer for part in chained(optimizer) if part.optimizer is not None]


class GPUMemory:
    """Memory of the current GPU."""

    def __init__(self) -> None:
        self.total, self._has_reported = torch.cuda.mem_get_info()[1], False

    def free_here(self) -> int:
        return self.free_elsewhere() + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def free_elsewhere(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def trim(self) -> None:
        """Empty torch's cache, and log once which large segments stay."""
        torch.cuda.empty_cache()
        if self._has_reported or torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < _LARGE_BYTES // 2:
            return
        text = describe_fragmentation(torch.cuda.memory_snapshot())
        if text is not None:
            self._has_reported = True
            log.info("%s", text)


class CPUMemory:
    """Memory of the host, if it is the device."""

    def __init__(self) -> None:
        self.total = psutil.virtual_memory().total

    def free_here(self) -> int:
        return psutil.virtual_memory().available

    free_elsewhere = free_here

    def trim(self) -> None:
        """Do nothing: there is no cache."""


def return_memory() -> None:
    """Return this process's GPU memory to the driver, after the model is dropped. Raises RuntimeError: the GPU has
    failed, so every later call of this process would, or something keeps the memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_host_cache()
    kept = torch.cuda.memory_allocated()
    log.info("%.2f GiB of the GPU's memory are in use without a model", kept / GIB)
    if kept > _LIBRARY_SHARE * torch.cuda.mem_get_info()[1]:
        raise RuntimeError(f"{kept / GIB:.2f} GiB of the GPU's memory stay in use without a model")


def describe_fragmentation(segments: Iterable[Mapping[str, Any]]) -> str | None:
    """Describe the large segments of `torch.cuda.memory_snapshot` that are less than half in use; None without any."""
    sizes = [(one["total_size"], one["allocated_size"]) for one in segments]
    held = [(total, used) for total, used in sizes if total >= _LARGE_BYTES and 2 * used < total]
    if not held:
        return None
    total, used = (sum(column) for column in zip(*held, strict=True))
    largest, part = max(held)
    return (
        f"torch's cache keeps {total / GIB:.2f} GiB that engines could use, because {used / MIB:.1f} MiB in "
        f"{len(held)} segments are in use; the largest has {largest / GIB:.2f} GiB, of which {part / MIB:.1f} MiB are "
        "in use"
    )


def clear_module_caches(model: MegatronModel) -> None:
    """Clear caches of modules, such as rotary embeddings, those of orders of tokens, and the last input of a pipeline
    stage. A small tensor can keep a segment of several GiB in torch's cache."""
    for chunk in model.bare_chunks:
        chunk.set_input_tensor([None])
    kinds = {type(module) for chunk in model.bare_chunks for module in chunk.modules()}
    of_modules = [kind.forward for kind in kinds if hasattr(kind.forward, "cache_clear")]
    for cached in (*of_modules, places_of_ranks, places_of_sequences):
        cached.cache_clear()
