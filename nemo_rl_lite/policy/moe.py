"""Routers of MoE models: precision, freezing, and replay.

Router replay (Ma et al., "Stabilizing MoE reinforcement learning by aligning training and inference routers",
arXiv:2510.11370): the policy uses the experts that the engine chose for each token. Engine and policy round
differently, so their routers may choose differently between experts with close scores. That changes a token's logprobs
far more than rounding does. Only the choice is replayed; the policy's router weights the experts, with gradient.

megatron-core's routers read the experts from their field `router_replay`. The class here also handles tokens without
recorded experts, and pipelines, which may recompute a micro-batch's layers after later micro-batches have started.

Shapes: n rows of S positions, M positions on this rank, L layers, E experts (k chosen), b sequences.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.config.schema import MegatronConfig
from nemo_rl_lite.losses.batch import RoutedExperts
from nemo_rl_lite.policy.context import ContextRanks
from nemo_rl_lite.policy.micro_batches import ModelInput, sent

# An expert that no engine reported.
NO_EXPERT = -1


@dataclass(eq=False)
class ReplayedRouter:
    """Experts that replace the choice of a layer's router."""

    layer: int
    """Index in the whole model."""
    recomputes: bool
    """The backward pass may recompute the layer (activation checkpointing)."""
    _now: Tensor | None = None
    _again: deque[Tensor | None] = field(default_factory=deque)

    def begin(self, experts_Mk: Tensor | None, trains: bool) -> None:
        """Set the experts of the next micro-batch's forward pass; with None the router chooses."""
        self._now = experts_Mk
        if trains and self.recomputes:
            self._again.append(experts_Mk)

    def get_replay_topk(
        self,
        scores_ME: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the experts, [M, k] each, to megatron-core."""
        scores_Mk, own_Mk = default_compute_topk(scores_ME, topk, num_groups, group_topk)
        # Backward passes are in the order of forward passes. Without recomputation, the forward pass has gradients
        # enabled, and takes the experts that `begin` has just added.
        is_again = self.recomputes and torch.is_grad_enabled() and self._again
        replayed_Mk = self._again.popleft() if is_again else self._now
        if replayed_Mk is None:
            return scores_Mk, own_Mk
        chosen_Mk = torch.where(replayed_Mk == NO_EXPERT, own_Mk, replayed_Mk.long())
        return scores_ME.gather(1, chosen_Mk), chosen_Mk


@dataclass(frozen=True)
class RouterReplay:
    """Replayed routers of this rank's layers."""

    routers: Sequence[Sequence[ReplayedRouter]]
    """Routers by model chunk."""
    context: ContextRanks
    sequence_rank: int
    sequence_size: int
    """Tensor-parallel ranks that split each sequence."""
    device: torch.device

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the routers, in their order."""
        return tuple(router.layer for routers in self.routers for router in routers)

    def begin(self, micro: ModelInput, experts: RoutedExperts | None, trains: bool, chunk: int) -> None:
        """Set the experts of the next forward pass of a chunk over `micro`, from those of the whole batch in
        `layers`."""
        routers, first = self.routers[chunk], sum(map(len, self.routers[:chunk]))
        layers = slice(first, first + len(routers))
        chosen = self._own(micro, experts, layers) if experts is not None else [None] * len(routers)
        for router, own in zip(routers, chosen, strict=True):
            router.begin(own, trains)

    def _own(self, micro: ModelInput, experts: RoutedExperts, layers: slice) -> Sequence[Tensor]:
        """Return the experts [M, k] at the positions of the routers at `layers` in order, in position order."""
        own = experts.rows(micro.rows.numpy())
        laid_nSLk = micro.lay(
            torch.tensor(own.values[:, layers], dtype=torch.int16), torch.from_numpy(own.counts), NO_EXPERT
        )
        laid_nSLk = self.context.of(micro).own(laid_nSLk, micro)
        laid_SnLk = laid_nSLk.transpose(0, 1).chunk(self.sequence_size)[self.sequence_rank]
        return sent(laid_SnLk.flatten(0, 1).transpose(0, 1).contiguous(), self.device).unbind()


def set_fields(provider: Any, options: MegatronConfig) -> None:
    """Set the routers' fields of megatron-bridge's provider, before it is finalized."""
    # The pretraining recipe's auxiliary loss would silently add to the gradient.
    provider.moe_router_load_balancing_type, provider.moe_aux_loss_coeff = "none", 0.0
    # Its load balancing changes biases at each step, regardless of the gradient.
    provider.moe_router_bias_update_rate = options.moe_router_bias_update_rate
    if options.moe_router_dtype is not None:
        provider.moe_router_dtype = options.moe_router_dtype


def freeze(chunks: list[Any]) -> list[Any]:
    """Freeze the routers' weights, before wrapping allocates gradients."""
    for router in _routers(chunks):
        for parameter in router.parameters():
            parameter.requires_grad_(False)
    return chunks


def keep_biases_in_float32(chunks: list[Any]) -> None:
    """Convert the biases before the weights are loaded, so that they are not rounded. megatron-core converts them in
    the first forward pass, when copies of the state already have the old size."""
    for bias in expert_biases(chunks):
        bias.data = bias.data.float()


def expert_biases(chunks: list[Any]) -> list[Tensor]:
    """Return the load-balancing biases, [experts] per layer: buffers that megatron-core's `finalize_model_grads`
    updates."""
    biases = (getattr(router, "expert_bias", None) for router in _routers(chunks))
    return [bias for bias in biases if bias is not None]


def replaying(chunks: list[Any], options: MegatronConfig, context: ContextRanks, device: torch.device) -> RouterReplay:
    """Install replay in the routers of these chunks."""
    from megatron.core import parallel_state

    splits, recomputes = options.sequence_parallel, options.activation_checkpointing
    routers: list[list[Any]] = [list(_routers([chunk])) for chunk in chunks]
    for router in (router for own in routers for router in own):
        router.router_replay = ReplayedRouter(router.layer_number - 1, recomputes)
    return RouterReplay(
        [[router.router_replay for router in own] for own in routers],
        context,
        sequence_rank=parallel_state.get_tensor_model_parallel_rank() if splits else 0,
        sequence_size=parallel_state.get_tensor_model_parallel_world_size() if splits else 1,
        device=device,
    )


def _routers(chunks: list[Any]) -> Iterator[torch.nn.Module]:
    from megatron.core.transformer.moe.router import Router

    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router))
