"""megatron-core's CPU optimizer keeps master weights and Adam's moments in host memory and steps them there.

Each rank's share of the parameters is split at `optimizer_offload_fraction`. For the first part the float32 masters and
both moments (12 bytes a parameter), and a page-locked copy of the gradient (4 bytes), stay in host memory, and torch's
fused AdamW steps them; the rest is on the GPU, under Transformer Engine's FusedAdam. Both decouple weight decay from
the gradient, as the GPU's optimizer does.
"""

import gc
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_lite.compat.torch import free_host_cache
from nemo_rl_lite.config.sections.policy import OptimizerConfig


def megatron_options(settings: OptimizerConfig) -> dict[str, Any]:
    """Return the additional fields for megatron-core's OptimizerConfig; none where the CPU optimizer is off."""
    if not settings.optimizer_cpu_offload:
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": settings.optimizer_offload_fraction,
        "overlap_cpu_optimizer_d2h_h2d": settings.overlap_cpu_optimizer_d2h_h2d,
        # Without this option megatron-core also keeps float32 masters of all parameters on the GPU. With it, gradients
        # are separate from parameters (`decoupled_grad`), so bfloat16 weights get the buffer's float32 gradients;
        # masters and moments stay float32.
        "use_precision_aware_optimizer": True,
    }


def stays_on_host(settings: OptimizerConfig) -> bool:
    """Return whether no phase may move optimizer states, whatever the fraction: a move would take the states of the
    CPU's part to the GPU, away from their parameters."""
    return settings.optimizer_cpu_offload


def is_split(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is megatron-core's CPU optimizer."""
    return hasattr(optimizer, "sub_optimizers")


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step parameters: those of the host's and the GPU's part, or the optimizer itself."""
    return getattr(optimizer, "sub_optimizers", [optimizer])


def release_copies_of_construction() -> None:
    """Free the copies that megatron-core leaves behind: it first builds the optimizer over whole parameters, with
    page-locked copies, and then over this rank's share; and it makes new copies when it reads a checkpoint."""
    # The first optimizer is part of reference cycles.
    gc.collect()
    torch.cuda.empty_cache()
    free_host_cache()


def step_threads() -> int:
    """Return the number of CPU threads for this rank's optimizer step: the CPUs that the rank may use (those of its
    NUMA node, where it is bound to one), divided among the ranks that may use the same CPUs.

    Collective: every rank of the default process group calls it.
    """
    own = (socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))))
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, own)
    return fair_share(own, places)


def fair_share(own: tuple[str, Sequence[int]], places: Sequence[tuple[str, Sequence[int]]]) -> int:
    """Return the CPUs of `own` (host name and CPUs) divided by the number of equal `places`, at least 1."""
    return max(1, len(own[1]) // places.count(own))
