"""The kernels that megatron-bridge's provider gets on GPUs, for models with and without experts."""

from types import SimpleNamespace

import pytest
import torch.nn.functional as F

from nemo_rl_lite.policy.megatron.provider import set_fields
from nemo_rl_lite.rules.compose import compose_config

KEYS = "policy.megatron_cfg.moe_"


def provider_on_a_gpu(experts: int | None, *overrides: str) -> SimpleNamespace:
    """A provider as a bridge leaves it that chooses no kernels, and what becomes of it on a GPU."""
    own = dict.fromkeys(("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"), False)
    provider = SimpleNamespace(num_moe_experts=experts, gated_linear_unit=True, activation_func=F.silu, **own)
    gpu = ["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "policy.model_name=someone/model"]
    sizes = ["policy.max_total_sequence_length=64", "generation.max_new_tokens=16"]
    set_fields(provider, compose_config([*gpu, *sizes, *overrides]).policy, on_gpu=True)
    return provider


def test_experts_are_multiplied_in_groups_and_reached_by_fused_kernels():
    provider = provider_on_a_gpu(8)
    assert provider.moe_grouped_gemm and provider.moe_permute_fusion and not provider.moe_router_fusion


@pytest.mark.parametrize("name", ["grouped_gemm", "permute_fusion"])
def test_each_kernel_can_be_left_out(name):
    provider = provider_on_a_gpu(8, f"{KEYS}{name}=false")
    kernels = {one: getattr(provider, f"moe_{one}") for one in ("grouped_gemm", "permute_fusion")}
    assert kernels == {"grouped_gemm": name != "grouped_gemm", "permute_fusion": name != "permute_fusion"}


def test_routers_are_fused_where_they_compute_in_float32():
    assert provider_on_a_gpu(8, f"{KEYS}router_fusion=true", f"{KEYS}router_dtype=fp32").moe_router_fusion


def test_a_model_without_experts_keeps_its_fields():
    provider = provider_on_a_gpu(None)
    assert not provider.moe_grouped_gemm and not provider.moe_permute_fusion
    assert provider.apply_rope_fusion and provider.bias_activation_fusion
