"""megatron-core's CPU optimizer: master weights and Adam's moments live in host memory and are stepped there.

Each rank's share of the parameters is split at `optimizer_offload_fraction`. For the first part the float32 masters and
both moments (12 bytes a parameter), and a page-locked copy of the gradient (4 bytes), are in host memory for good, and
torch's fused AdamW steps them; for the rest they are on the GPU, under Transformer Engine's FusedAdam. Both decay
weights apart from the gradient, as the GPU's optimizer does.
"""

import gc
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_lite.config.schema import OptimizerConfig


def megatron_options(settings: OptimizerConfig) -> dict[str, Any]:
    """What megatron-core's OptimizerConfig needs beside the usual; nothing where the CPU optimizer is off."""
    if not settings.optimizer_cpu_offload:
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": settings.optimizer_offload_fraction,
        "overlap_cpu_optimizer_d2h_h2d": settings.overlap_cpu_optimizer_d2h_h2d,
        # Without it megatron-core keeps float32 masters of all parameters on the GPU besides. With it, gradients stay
        # apart from parameters (`decoupled_grad`), so that bfloat16 weights have the buffer's float32 gradients, and
        # masters and moments are float32 as ever.
        "use_precision_aware_optimizer": True,
    }


def stays_on_host(settings: OptimizerConfig) -> bool:
    """Whether no phase may move optimizer states, whatever the fraction: moving them would take those of the CPU's part
    to the GPU, away from the parameters they belong to."""
    return settings.optimizer_cpu_offload


def is_split(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is megatron-core's CPU optimizer."""
    return hasattr(optimizer, "sub_optimizers")


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """What steps parameters: those of the host's and of the GPU's part, or the optimizer itself."""
    return getattr(optimizer, "sub_optimizers", [optimizer])


def collect_states(optimizer: Any) -> None:
    """Let a CPU optimizer know the states that its parts have, and their float32 weights, as after a step."""
    optimizer._sync_sub_optimizers_state_to_hdo()


def forget_classes(optimizer: torch.optim.Optimizer) -> None:
    """Take from the groups of a CPU optimizer the classes of its parts, which it keeps elsewhere too: a checkpoint of
    them could not be read without running what it names."""
    for group in optimizer.param_groups:
        for name in ("cpu_optimizer_cls", "gpu_optimizer_cls"):
            group.pop(name, None)


def release_copies_of_construction() -> None:
    """Give back what megatron-core leaves behind: it builds the optimizer over whole parameters first, with page-locked
    copies of them, and again over this rank's share; and it makes new copies when it reads a checkpoint."""
    # The first one is part of reference cycles.
    gc.collect()
    torch.cuda.empty_cache()
    # torch keeps page-locked memory for later, in sizes that nothing asks for again.
    torch._C._host_emptyCache()


def step_threads() -> int:
    """CPU threads that this rank steps its part with: the CPUs it may use (those of its NUMA node, where it is bound to
    it), shared by the ranks that may use the same.

    Collective: every rank of the default process group calls it.
    """
    own = (socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))))
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, own)
    return fair_share(own, places)


def fair_share(own: tuple[str, Sequence[int]], places: Sequence[tuple[str, Sequence[int]]]) -> int:
    """CPUs of `own` (host name and CPUs) for each of the `places` that are the same, at least 1."""
    return max(1, len(own[1]) // places.count(own))
