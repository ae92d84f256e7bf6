"""The policy: its model, batches, optimizer, ranks and offloading; and its teacher."""

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_rl_lite.config.sections.types import (
    STRICT,
    Auto,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

Precision = Literal["float32", "bfloat16"]
# Parts of a layer whose inputs can be kept in host memory until the backward pass.
OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp", "expert_fc1", "moe_act"]
# Linear layers that can have an adapter.
LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
# Components that can leave the GPU while the engines generate.
OffloadedComponent = Literal["parameters", "gradients", "optimizer_states"]
TokenLimit = PositiveInt | Auto


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    optimizer: Literal["adam", "sgd"]
    lr: Annotated[float, Field(gt=0, le=10)]
    min_lr: NonNegativeFloat
    weight_decay: NonNegativeFloat
    adam_beta1: Annotated[float, Field(ge=0, lt=1)]
    adam_beta2: Annotated[float, Field(ge=0, lt=1)]
    adam_eps: PositiveFloat
    sgd_momentum: Annotated[float, Field(ge=0, lt=1)]
    use_distributed_optimizer: bool
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: Annotated[float, Field(ge=0, le=1)]
    overlap_cpu_optimizer_d2h_h2d: bool


@dataclass(frozen=True, config=STRICT)
class SchedulerConfig:
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"]
    lr_decay_iters: PositiveInt
    lr_warmup_iters: NonNegativeInt
    lr_warmup_init: NonNegativeFloat


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    enabled: bool
    dim: PositiveInt
    alpha: PositiveInt
    dropout: Annotated[float, Field(ge=0, lt=1)]
    target_modules: Annotated[list[LoraTarget], Field(min_length=1)]


@dataclass(frozen=True, config=STRICT)
class DataParallelConfig:
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    bucket_size: PositiveInt | None


@dataclass(frozen=True, config=STRICT)
class MegatronConfig:
    tensor_model_parallel_size: PositiveInt
    pipeline_model_parallel_size: PositiveInt
    num_layers_in_first_pipeline_stage: PositiveInt | None
    num_layers_in_last_pipeline_stage: PositiveInt | None
    context_parallel_size: PositiveInt
    cp_comm_type: Literal["p2p", "a2a"]
    expert_model_parallel_size: PositiveInt
    sequence_parallel: bool
    freeze_moe_router: bool
    moe_router_dtype: Literal["fp32", "fp64"] | None
    moe_router_bias_update_rate: NonNegativeFloat
    moe_grouped_gemm: bool
    moe_permute_fusion: bool
    moe_router_fusion: bool
    cuda_graph_impl: Literal["none", "full_iteration"]
    activation_checkpointing: bool
    fine_grained_activation_offloading: bool
    offload_modules: list[OffloadModule] | None
    activation_offload_fraction: Fraction
    keep_logits: bool | Auto
    peft: LoraConfig
    distributed_data_parallel_config: DataParallelConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig


@dataclass(frozen=True, config=STRICT)
class SequencePackingConfig:
    enabled: bool | Auto
    train_mb_tokens: TokenLimit
    logprob_mb_tokens: TokenLimit


@dataclass(frozen=True, config=STRICT)
class DynamicBatchingConfig:
    enabled: bool
    train_mb_tokens: TokenLimit
    logprob_mb_tokens: TokenLimit


@dataclass(frozen=True, config=STRICT)
class RouterReplayConfig:
    enabled: bool


@dataclass(frozen=True, config=STRICT)
class TokenizerConfig:
    chat_template: Annotated[str, Field(min_length=1)] | None
    chat_template_kwargs: dict[str, Any]


@dataclass(frozen=True, config=STRICT)
class PolicyConfig:
    model_name: Annotated[str, Field(min_length=1)]
    tokenizer: TokenizerConfig
    precision: Precision
    train_global_batch_size: PositiveInt
    train_micro_batch_size: PositiveInt
    logprob_batch_size: PositiveInt
    sequence_packing: SequencePackingConfig
    dynamic_batching: DynamicBatchingConfig
    sequence_length_round: PositiveInt
    max_total_sequence_length: PositiveInt
    router_replay: RouterReplayConfig
    max_grad_norm: PositiveFloat | None
    max_skipped_steps: PositiveInt
    offload_optimizer_states_for_logprob: bool
    offload_for_generation: list[OffloadedComponent] | Auto
    use_pinned_optimizer_offload: bool
    overlap_offload: bool
    megatron_cfg: MegatronConfig


@dataclass(frozen=True, config=STRICT)
class TeacherParallelConfig:
    """The keys of `MegatronConfig` that a model has which does not train."""

    tensor_model_parallel_size: PositiveInt
    pipeline_model_parallel_size: PositiveInt
    num_layers_in_first_pipeline_stage: PositiveInt | None
    num_layers_in_last_pipeline_stage: PositiveInt | None
    expert_model_parallel_size: PositiveInt
    sequence_parallel: bool
    moe_router_dtype: Literal["fp32", "fp64"] | None


@dataclass(frozen=True, config=STRICT)
class TeacherConfig:
    """The keys of `PolicyConfig` that may be others for a teacher."""

    model_name: Annotated[str, Field(min_length=1)] | None
    precision: Precision
    logprob_batch_size: PositiveInt
    logprob_mb_tokens: TokenLimit
    offload: bool
    megatron_cfg: TeacherParallelConfig
