"""What of a megatron-core model and its optimizer can leave the device, as `offload/` takes it."""

from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch import Tensor

from nemo_rl_lite.config.schema import PolicyConfig
from nemo_rl_lite.offload.arena import CudaRegistrar, HostArena, Registrar
from nemo_rl_lite.offload.gradients import GradientBuffers
from nemo_rl_lite.offload.mover import Movable
from nemo_rl_lite.offload.optimizer_states import optimizer_tensors
from nemo_rl_lite.offload.phases import PhaseMemory
from nemo_rl_lite.offload.residency import Residency
from nemo_rl_lite.policy.megatron.model import MegatronModel


def phase_memory(config: PolicyConfig, model: MegatronModel, optimizer: Any, residency: Residency) -> PhaseMemory:
    """This rank's parameters, gradients and optimizer states, ready to move."""
    device, on_gpu = model.device, model.device.type == "cuda"
    registrar = host_registrar(model) if config.use_pinned_optimizer_offload else None
    gradients = [buffer.grad_data for buffer in _ddp_buffers(model)]

    def states() -> list[Tensor]:
        return optimizer_tensors(torch_optimizers(optimizer), [*model.parameters(), *gradients])

    return PhaseMemory(
        residency,
        Movable("parameters", model.parameters, HostArena("parameters", registrar), device),
        Movable("optimizer_states", states, HostArena("optimizer states", registrar), device),
        GradientBuffers(gradients),
        overlap=config.overlap_offload,
        total_bytes=torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total,
        free_bytes=free_device_bytes if on_gpu else lambda: psutil.virtual_memory().available,
        trim=torch.cuda.empty_cache if on_gpu else lambda: None,
    )


def host_registrar(model: MegatronModel) -> Registrar | None:
    """What page-locks host memory for the model's device; None on a CPU, where nothing needs it."""
    return CudaRegistrar() if model.device.type == "cuda" else None


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside a megatron-core optimizer, chained or not."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]


def free_device_bytes() -> int:
    """Bytes of the current GPU that this process could take, those included that torch keeps for later."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _ddp_buffers(model: MegatronModel) -> Iterator[Any]:
    for chunk in model.chunks:
        yield from chunk.buffers
        yield from chunk.expert_parallel_buffers
