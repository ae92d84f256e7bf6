"""The components of a megatron-core model and its optimizer that can leave the device, as `offload/` takes them.

What passes leave behind on the device. Small as it is, it keeps large segments of torch's cache from being freed: a
tensor of 2 MiB can lie in the segment of several GiB that gradients have left.

The reference policy: the starting weights, kept in host memory and swapped into the model for a forward pass; or
the model without its adapters.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor

from nemo_rl_lite.config.schema import PolicyConfig
from nemo_rl_lite.offload.host_memory import CudaRegistrar, HostArena, Registrar
from nemo_rl_lite.offload.mover import HostCopy, Movable
from nemo_rl_lite.offload.phases import GradientBuffers, PhaseMemory, optimizer_tensors
from nemo_rl_lite.offload.residency import Component, Residency
from nemo_rl_lite.policy.model import MegatronModel, WithoutAdapters

log = logging.getLogger(__name__)

# Segments below this size are not worth a line of the log.
LARGE_BYTES = 256 << 20

GIB, MIB = 2**30, 2**20


def clear_module_caches(model: MegatronModel) -> None:
    """Empty the caches of modules such as rotary embeddings, which keep results by their arguments, and drop the last
    input of a pipeline stage."""
    for chunk in model.bare_chunks:
        chunk.set_input_tensor([None])
    kinds = {type(module) for chunk in model.bare_chunks for module in chunk.modules()}
    for cached in (kind.forward for kind in kinds if hasattr(kind.forward, "cache_clear")):
        cached.cache_clear()


class HeldSegments:
    """Says once in the log which large segments of torch's cache stay when it is emptied to make room for others."""

    def __init__(self) -> None:
        self._said = False

    def report(self) -> None:
        """Call this after torch's cache has been emptied."""
        if self._said or torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < LARGE_BYTES // 2:
            return
        text = mostly_empty(torch.cuda.memory_snapshot())
        if text is not None:
            self._said = True
            log.info("%s", text)


def mostly_empty(segments: Iterable[Mapping[str, Any]]) -> str | None:
    """A sentence about the large segments, of `torch.cuda.memory_snapshot`, of which less than half is in use; None
    where there are none."""
    sizes = [(one["total_size"], one["allocated_size"]) for one in segments]
    held = [(total, used) for total, used in sizes if total >= LARGE_BYTES and 2 * used < total]
    if not held:
        return None
    total, used = (sum(column) for column in zip(*held, strict=True))
    largest, part = max(held)
    return (
        f"torch's cache keeps {total / GIB:.2f} GiB that engines could use, because {used / MIB:.1f} MiB in "
        f"{len(held)} segments are in use; the largest has {largest / GIB:.2f} GiB, of which {part / MIB:.1f} MiB are "
        "in use"
    )


def phase_memory(config: PolicyConfig, model: MegatronModel, optimizer: Any, residency: Residency) -> PhaseMemory:
    """This rank's parameters, gradients and optimizer states, ready to move."""
    device, on_gpu = model.device, model.device.type == "cuda"
    registrar = host_registrar(config, model)
    gradients = gradient_buffers(model)

    def states() -> list[Tensor]:
        return optimizer_tensors(torch_optimizers(optimizer), [*model.parameters(), *gradients])

    return PhaseMemory(
        residency,
        Movable("parameters", model.own_parameters, HostArena("parameters", registrar), device),
        Movable("optimizer_states", states, HostArena("optimizer states", registrar), device),
        GradientBuffers(gradients),
        overlap=config.overlap_offload,
        device=GPUMemory() if on_gpu else CPUMemory(),
    )


def host_registrar(config: PolicyConfig, model: MegatronModel) -> Registrar | None:
    """The registrar that page-locks host memory for copies to the model's device; None where it is off, or on a CPU."""
    return CudaRegistrar() if config.use_pinned_optimizer_offload and model.device.type == "cuda" else None


def require_weights(model: MegatronModel, phases: PhaseMemory) -> None:
    """Check that the parameters are on the device, and complete them, since other ranks may have new values of them.
    Collective. Raises RuntimeError: they are not on the device."""
    phases.require(Component.PARAMETERS)
    model.gather.complete()


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside a megatron-core optimizer, chained or not."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]


class GPUMemory:
    """Memory of the current GPU."""

    def __init__(self) -> None:
        self.total, self._held = torch.cuda.mem_get_info()[1], HeldSegments()

    def free_here(self) -> int:
        return self.free_elsewhere() + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def free_elsewhere(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def trim(self) -> None:
        torch.cuda.empty_cache()
        self._held.report()


class CPUMemory:
    """The host's memory, where the host is the device."""

    def __init__(self) -> None:
        self.total = psutil.virtual_memory().total

    def free_here(self) -> int:
        return psutil.virtual_memory().available

    def free_elsewhere(self) -> int:
        return psutil.virtual_memory().available

    def trim(self) -> None:
        """Do nothing: the host's freed memory needs no trimming."""


def gradient_buffers(model: MegatronModel) -> list[Tensor]:
    """The flat tensors that hold this rank's gradients."""
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return [buffer.grad_data for buffer in buffers]


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
