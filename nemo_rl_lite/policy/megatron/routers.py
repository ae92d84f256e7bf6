"""The routers of a mixture-of-experts model: what they compute in, and what may change them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.config.sections.policy import MegatronConfig
from nemo_rl_lite.policy.megatron.context import ContextRanks
from nemo_rl_lite.policy.megatron.replay import ReplayedRouter, RouterReplay


def set_fields(provider: Any, options: MegatronConfig) -> None:
    """Set the routers' fields of megatron-bridge's provider, before it is finalized."""
    # The loss is the algorithm's alone: the pretraining recipe's auxiliary loss would silently add to its gradient.
    provider.moe_router_load_balancing_type, provider.moe_aux_loss_coeff = "none", 0.0
    # So would its balancing of experts, which changes a bias at every step whatever the gradient.
    provider.moe_router_bias_update_rate = options.moe_router_bias_update_rate
    if options.moe_router_dtype is not None:
        provider.moe_router_dtype = options.moe_router_dtype


def freeze(chunks: list[Any]) -> list[Any]:
    """Take the routers' weights out of training. Comes before the chunks are wrapped, which gives gradients memory."""
    for router in _routers(chunks):
        for parameter in router.parameters():
            parameter.requires_grad_(False)
    return chunks


def keep_biases_in_float32(chunks: list[Any]) -> None:
    """Do at once what megatron-core does in the first forward pass, because a copy of the memory from before would not
    fit any more. Comes before the weights are loaded, so that the biases are not rounded."""
    for bias in expert_biases(chunks):
        bias.data = bias.data.float()


def expert_biases(chunks: list[Any]) -> list[Tensor]:
    """The biases, [experts] of a layer each, that balance experts. They are buffers: no gradient changes them, but
    megatron-core's `finalize_model_grads` does, at a rate above 0."""
    biases = (getattr(router, "expert_bias", None) for router in _routers(chunks))
    return [bias for bias in biases if bias is not None]


def replaying(chunks: list[Any], options: MegatronConfig, context: ContextRanks, device: torch.device) -> RouterReplay:
    """Let the routers take the experts that they are told."""
    from megatron.core import parallel_state

    splits, recomputes = options.sequence_parallel, options.activation_checkpointing
    routers: list[Any] = list(_routers(chunks))
    for router in routers:
        router.router_replay = ReplayedRouter(router.layer_number - 1, recomputes)
    return RouterReplay(
        [router.router_replay for router in routers],
        context,
        sequence_rank=parallel_state.get_tensor_model_parallel_rank() if splits else 0,
        sequence_size=parallel_state.get_tensor_model_parallel_world_size() if splits else 1,
        device=device,
    )


def _routers(chunks: list[Any]) -> Iterator[torch.nn.Module]:
    from megatron.core.transformer.moe.router import Router

    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router))
