"""The fields of megatron-bridge's provider, from which it builds a model: the parallel layout, and the kernels."""

from typing import Any

import torch
import torch.nn.functional as F

from nemo_rl_lite.config.sections.policy import MegatronConfig, PolicyConfig
from nemo_rl_lite.offload import activations
from nemo_rl_lite.policy.megatron import routers

# Fused kernels of Apex and Transformer Engine, which the local layer spec replaces by plain torch.
_FUSIONS = (
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "moe_permute_fusion",
    "moe_grouped_gemm",
    "moe_router_fusion",
)


def torch_dtype(precision: str) -> torch.dtype:
    return getattr(torch, precision)


def set_fields(provider: Any, config: PolicyConfig, on_gpu: bool) -> None:
    """Set what the configuration says, before the provider is finalized: with Transformer Engine's layers on a GPU,
    with megatron-core's local ones on a CPU."""
    _set_layout(provider, config)
    if on_gpu:
        _set_gpu_kernels(provider, config.megatron_cfg)
    else:
        _set_cpu_kernels(provider)


def _set_layout(provider: Any, config: PolicyConfig) -> None:
    parallel, dtype = config.megatron_cfg, torch_dtype(config.precision)
    provider.tensor_model_parallel_size = parallel.tensor_model_parallel_size
    provider.pipeline_model_parallel_size = parallel.pipeline_model_parallel_size
    provider.num_layers_in_first_pipeline_stage = parallel.num_layers_in_first_pipeline_stage
    provider.num_layers_in_last_pipeline_stage = parallel.num_layers_in_last_pipeline_stage
    provider.context_parallel_size, provider.cp_comm_type = parallel.context_parallel_size, parallel.cp_comm_type
    provider.expert_model_parallel_size = parallel.expert_model_parallel_size
    provider.sequence_parallel = parallel.sequence_parallel
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, False
    # Pipeline stages send each other the shape of each micro-batch; the all-to-all dispatcher of experts allows for it.
    provider.variable_seq_lengths = parallel.pipeline_model_parallel_size > 1
    provider.moe_token_dispatcher_type = "alltoall"
    # A tensor-parallel group does not split single experts: whole experts are distributed over ranks.
    provider.expert_tensor_parallel_size = 1
    routers.set_fields(provider, parallel)
    if parallel.activation_checkpointing:
        provider.recompute_granularity, provider.recompute_method, provider.recompute_num_layers = "full", "uniform", 1
    activations.set_fields(provider, parallel)


def _set_gpu_kernels(provider: Any, options: MegatronConfig) -> None:
    # Without fusion, packed sequences are rotated one by one, in Python.
    provider.apply_rope_fusion = True
    # megatron-bridge sets it for some models only; unfused, the MLP's activation keeps two more copies of its input.
    provider.bias_activation_fusion = provider.gated_linear_unit and provider.activation_func is F.silu
    # megatron-core's output layer needs Apex for it.
    provider.gradient_accumulation_fusion = False
    if provider.num_moe_experts:
        _set_expert_kernels(provider, options)


def _set_expert_kernels(provider: Any, options: MegatronConfig) -> None:
    """Set how the experts of each layer are reached and multiplied. Whether shared experts compute while tokens travel
    is left to the bridge, which knows the model.

    The all-to-all of routed experts is not overlapped with other work. megatron-core's
    `overlap_moe_expert_parallel_comm` runs a forward pass next to the backward pass of the micro-batch before: two
    micro-batches have activations at a time, and a schedule plan takes the place of the `forward` of `one_pass`. Its
    `overlap_dispatch_backward_with_experts_wgrad` is for its FSDP: it computes gradients of experts after the hooks
    that add them to the gradient buffers of its DistributedDataParallel.
    """
    provider.moe_grouped_gemm = options.moe_grouped_gemm
    provider.moe_permute_fusion = options.moe_permute_fusion
    provider.moe_router_fusion = options.moe_router_fusion


def _set_cpu_kernels(provider: Any) -> None:
    from megatron.bridge.models.gpt_provider import local_layer_spec

    provider.transformer_layer_spec = local_layer_spec
    provider.use_cpu_initialization = True
    for fusion in _FUSIONS:
        setattr(provider, fusion, False)
