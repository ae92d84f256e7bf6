"""Builds megatron-core's optimizer and learning-rate schedule from the configuration."""

import math
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_lite.compat.megatron import forget_classes
from nemo_rl_lite.config.sections.policy import PolicyConfig
from nemo_rl_lite.offload import cpu_optimizer
from nemo_rl_lite.policy.megatron.memory import gradient_buffers, torch_optimizers
from nemo_rl_lite.policy.megatron.model import MegatronModel
from nemo_rl_lite.policy.megatron.overlap import connect_schedules
from nemo_rl_lite.policy.megatron.provider import torch_dtype


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
            **cpu_optimizer.megatron_options(settings),
        ),
        model.chunks,
    )
    if settings.optimizer_cpu_offload:
        for own in torch_optimizers(optimizer):
            forget_classes(own)
        cpu_optimizer.release_copies_of_construction()
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
        connect_schedules(model.chunks, model_config)
    return optimizer, scheduler


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
