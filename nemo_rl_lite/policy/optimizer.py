"""Builds megatron-core's optimizer and learning-rate schedule from the configuration.

megatron-core's CPU optimizer keeps master weights and Adam's moments in host memory and steps them there.

Each rank's share of the parameters is split at `optimizer_offload_fraction`. For the first part the float32 masters and
both moments (12 bytes a parameter), and a page-locked copy of the gradient (4 bytes), stay in host memory, and torch's
fused AdamW steps them; the rest is on the GPU, under Transformer Engine's FusedAdam. Both decouple weight decay from
the gradient, as the GPU's optimizer does.
"""

import gc
import math
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_lite.compat.megatron import forget_classes
from nemo_rl_lite.compat.torch import free_host_cache
from nemo_rl_lite.config.schema import OptimizerConfig, PolicyConfig
from nemo_rl_lite.policy.memory import gradient_buffers, torch_optimizers
from nemo_rl_lite.policy.model import MegatronModel, torch_dtype


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


def build_optimizer(config: PolicyConfig, model: MegatronModel) -> tuple[Any, Any]:
    """Build the optimizer over the model's chunks and its scheduler, which counts optimizer steps.

    The gradient's norm is computed and reported also where `max_grad_norm` is null. Float32 master weights are copies
    of the model's weights as they are now, so those are loaded before.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.utils import get_model_config

    settings, schedule = config.megatron_cfg.optimizer, config.megatron_cfg.scheduler
    dtype = torch_dtype(config.precision)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=settings.optimizer,
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            sgd_momentum=settings.sgd_momentum,
            clip_grad=math.inf if config.max_grad_norm is None else config.max_grad_norm,
            bf16=config.precision == "bfloat16",
            params_dtype=dtype,
            use_distributed_optimizer=settings.use_distributed_optimizer,
            overlap_param_gather=model.gather.overlaps,
            **megatron_options(settings),
        ),
        model.chunks,
    )
    if settings.optimizer_cpu_offload:
        for own in torch_optimizers(optimizer):
            forget_classes(own)
        release_copies_of_construction()
    # megatron-core wants a decay after the warm-up also where the rate is constant.
    decays, least = schedule.lr_decay_style != "constant", schedule.lr_warmup_iters + 1
    decay_steps = schedule.lr_decay_iters if decays else max(schedule.lr_decay_iters, least)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters,
        lr_decay_steps=decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    for chunk in model.chunks:
        model_config = get_model_config(chunk)
        model_config.finalize_model_grads_func = model.finish_gradients
        model_config.grad_scale_func = optimizer.scale_loss
        _connect_schedules(model.chunks, model_config)
    return optimizer, scheduler


def _connect_schedules(chunks: list[Any], model_config: Any) -> None:
    """Connect megatron-core's schedules: they reduce gradients with the last micro-batch only, and those of later
    pipeline stages after all of their backward passes, as its own training loop does."""
    if not chunks[0].ddp_config.overlap_grad_reduce:
        return
    one = len(chunks) == 1
    no_sync, start = [chunk.no_sync for chunk in chunks], [chunk.start_grad_sync for chunk in chunks]
    model_config.no_sync_func = no_sync[0] if one else no_sync
    model_config.grad_sync_func = start[0] if one else start


def disconnect(model: MegatronModel) -> None:
    """Undo what connects a model with its optimizer, so that both can be freed. Autograd's nodes close their cycle, and
    Python's collector does not see these: float32 shards have them, and megatron-core's hooks are on them."""
    from megatron.core.utils import get_model_config

    for chunk in model.chunks:
        config = get_model_config(chunk)
        config.finalize_model_grads_func = config.grad_scale_func = None
        config.no_sync_func = config.grad_sync_func = None


def gradients_are_finite(model: MegatronModel) -> bool:
    """Whether the gradients of all ranks are finite; the same answer on every rank."""
    finite = torch.ones((), device=model.device)
    for gradients in gradient_buffers(model):
        # One infinity or NaN makes the sum infinite or NaN.
        finite *= gradients.sum().isfinite()
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite)
