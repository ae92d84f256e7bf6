"""The components of a megatron-core model and its optimizer that can leave the device, as `offload/` takes them."""

from typing import Any

import psutil
import torch
from torch import Tensor

from nemo_rl_lite.config.sections.policy import PolicyConfig
from nemo_rl_lite.offload.arena import CudaRegistrar, HostArena, Registrar
from nemo_rl_lite.offload.gradients import GradientBuffers
from nemo_rl_lite.offload.mover import Movable
from nemo_rl_lite.offload.optimizer_states import optimizer_tensors
from nemo_rl_lite.offload.phases import PhaseMemory
from nemo_rl_lite.offload.residency import Component, Residency
from nemo_rl_lite.policy.megatron.leftovers import HeldSegments
from nemo_rl_lite.policy.megatron.model import MegatronModel


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
