"""Build megatron-core's optimizer and learning-rate schedule from the configuration.

Its CPU optimizer keeps a share `optimizer_offload_fraction` of each rank's states in host memory. These are float32
masters and both moments (12 bytes per parameter), and a pinned copy of the gradient (4 bytes). torch's fused AdamW
steps them. Transformer Engine's FusedAdam steps the rest on the GPU. Both decouple weight decay.
"""

import gc
import math
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.megatron import add_norms_in_few_kernels, chained, copy_in_few_kernels, forget_classes
from nemo_rl_lite.compat.torch import foreach_mul, free_host_cache
from nemo_rl_lite.config.schema import PolicyConfig
from nemo_rl_lite.policy.memory import gradient_buffers, torch_optimizers
from nemo_rl_lite.policy.model import MegatronModel
from nemo_rl_lite.refit.group import all_gather

# Fields of megatron-core's OptimizerConfig that equal those of `policy.megatron_cfg.optimizer`.
_SAME_FIELDS = (
    *("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
    "use_distributed_optimizer",
)
_CPU_OFFLOAD_FIELDS = ("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")


def build_optimizer(config: PolicyConfig, model: MegatronModel) -> tuple[Any, Any]:
    """Build the optimizer and its scheduler, which counts optimizer steps. Load the weights first, because float32
    master weights are copies of them."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    settings, schedule = config.megatron_cfg.optimizer, config.megatron_cfg.scheduler
    states: dict[str, Any] = {}
    if settings.optimizer_cpu_offload:
        states = {name: getattr(settings, name) for name in _CPU_OFFLOAD_FIELDS}
        # Without it, megatron-core also keeps float32 masters of all parameters on the GPU. Gradients, masters and
        # moments stay float32.
        states["use_precision_aware_optimizer"] = True
    elif settings.use_precision_aware_optimizer and model.device.type == "cuda":
        states = {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": gradient_buffers(model)[0].dtype,
            "exp_avg_dtype": getattr(torch, settings.exp_avg_dtype),
            "exp_avg_sq_dtype": getattr(torch, settings.exp_avg_sq_dtype),
        }
    add_norms_in_few_kernels()
    copy_in_few_kernels()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            **{name: getattr(settings, name) for name in _SAME_FIELDS},
            bf16=config.precision == "bfloat16",
            params_dtype=getattr(torch, config.precision),
            # `take_step` clips.
            clip_grad=0.0,
            overlap_param_gather=model.gather.overlaps,
            **states,
        ),
        model.chunks,
    )
    if settings.optimizer_cpu_offload:
        for own in torch_optimizers(optimizer):
            forget_classes(own)
        release_copies_of_construction()
    elif states:
        for own in torch_optimizers(optimizer):
            own.register_step_pre_hook(allocate_states)
    # megatron-core requires decay steps after the warm-up even for a constant rate.
    decay_steps = schedule.lr_decay_iters
    if schedule.lr_decay_style == "constant":
        decay_steps = max(decay_steps, schedule.lr_warmup_iters + 1)
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
    _connect(model, optimizer)
    return optimizer, scheduler


def allocate_states(own: Any, *_: Any) -> None:
    """Allocate the states that Transformer Engine's Adam lacks. Its first step would allocate states and float32 copies
    of moments alternately. The freed copies would leave holes that are too small for activations."""
    for group in own.param_groups:
        for parameter in group["params"]:
            if not own.state[parameter]:
                own.initialize_state(parameter, own.store_param_remainders and parameter.dtype == torch.bfloat16)


def _connect(model: MegatronModel, optimizer: Any) -> None:
    from megatron.core.utils import get_model_config

    for chunk in model.chunks:
        model_config = get_model_config(chunk)
        model_config.finalize_model_grads_func = model.finish_gradients
        model_config.grad_scale_func = optimizer.scale_loss
        if model.chunks[0].ddp_config.overlap_grad_reduce:
            # As in megatron-core's training loop. Schedules reduce gradients with the last micro-batch, in later
            # pipeline stages after all backward passes.
            no_sync, start = zip(*((one.no_sync, one.start_grad_sync) for one in model.chunks), strict=True)
            model_config.no_sync_func = list(no_sync) if len(no_sync) > 1 else no_sync[0]
            model_config.grad_sync_func = list(start) if len(start) > 1 else start[0]


def disconnect(model: MegatronModel) -> None:
    """Disconnect a model from its optimizer, so that both can be freed. megatron-core's hooks on autograd nodes form a
    cycle that Python's collector does not see."""
    from megatron.core.utils import get_model_config

    for chunk in model.chunks:
        config = get_model_config(chunk)
        config.finalize_model_grads_func = config.grad_scale_func = None
        config.no_sync_func = config.grad_sync_func = None


def take_step(optimizer: Any, max_norm: float | None) -> float:
    """Scale the gradients to the maximum norm, and update the weights. Return the norm before. If it is not finite,
    nothing is updated. Collective."""
    # The host prepares all tensors before it waits for the norm, while the device is still in the backward pass.
    optimizer.prepare_grads()
    gradients = list(_gradients(optimizer))
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm
    # As megatron-core and torch.
    factor = math.inf if max_norm is None else max_norm / (norm + 1e-6)
    if gradients and factor < 1:
        foreach_mul(gradients, factor)
    optimizer.step_with_ready_grads()
    return norm


def _gradients(optimizer: Any) -> Iterator[Tensor]:
    for part in chained(optimizer):
        # Gradients and parameters may have different types.
        is_apart = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        for parameter in part.get_parameters():
            gradient = getattr(parameter, "decoupled_grad", None) if is_apart else parameter.grad
            if gradient is not None:
                yield gradient


def is_split(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is megatron-core's CPU optimizer."""
    return hasattr(optimizer, "sub_optimizers")


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the host's and the GPU's part, or the optimizer itself."""
    return getattr(optimizer, "sub_optimizers", [optimizer])


def release_copies_of_construction() -> None:
    """Free unused pinned copies. megatron-core builds the optimizer over whole parameters, then over this rank's share;
    it makes new copies when it reads a checkpoint."""
    # The first optimizer has reference cycles.
    gc.collect()
    torch.cuda.empty_cache()
    free_host_cache()


def rank_threads() -> int:
    """Return how many threads this rank may use: its CPUs, divided among the ranks that share them. Collective."""
    own = (socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))))
    return max(1, len(own[1]) // all_gather(own).count(own))
