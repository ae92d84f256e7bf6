"""Repairs of the experts of vLLM's CPU build (0.24).

Their layers choose experts past the routers that record them. On processors without AVX-512 each of their forward
passes makes a layer for the activation, which vLLM allows while it builds a model only.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def repair() -> None:
    """Let experts take the activation's function itself, before an engine starts in this process."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native


def record(model: nn.Module) -> None:
    """Let the layers of a model that was started with `enable_return_routed_experts` record what they choose."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            method: Any = module.routed_experts.quant_method
            router: Any = module.router
            method.apply_monolithic = _Recording(method.apply_monolithic, router.capture_fn)


class _Recording:
    """The function that computes a layer's experts, which first tells the same choice that it will make."""

    def __init__(self, compute: Callable[..., Tensor], tell: Callable[[Tensor], None]):
        self._compute, self._tell = compute, tell

    def __call__(self, layer: Any, x: Tensor, router_logits: Tensor, **more: Any) -> Tensor:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

        names = ("top_k", "use_grouped_topk", "renormalize", "topk_group", "num_expert_group")
        names += ("custom_routing_function", "scoring_func", "routed_scaling_factor", "e_score_correction_bias")
        _, chosen = select_experts(x, router_logits, **{name: getattr(layer, name) for name in names})
        self._tell(chosen)
        return self._compute(layer=layer, x=x, router_logits=router_logits, **more)
