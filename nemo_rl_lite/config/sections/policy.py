"""The policy: its model, batches, optimizer, ranks and offloading; and its teacher."""

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_rl_lite.config.sections.types import (
    STRICT,
    ActiveIf,
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
    min_lr: Annotated[
        NonNegativeFloat,
        ActiveIf("policy.megatron_cfg.scheduler.lr_decay_style", "linear", "cosine", "inverse-square-root"),
    ]
    weight_decay: NonNegativeFloat
    adam_beta1: Annotated[float, Field(ge=0, lt=1), ActiveIf(".optimizer", "adam")]
    adam_beta2: Annotated[float, Field(ge=0, lt=1), ActiveIf(".optimizer", "adam")]
    adam_eps: Annotated[PositiveFloat, ActiveIf(".optimizer", "adam")]
    sgd_momentum: Annotated[float, Field(ge=0, lt=1), ActiveIf(".optimizer", "sgd")]
    use_distributed_optimizer: bool
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: Annotated[float, Field(ge=0, le=1), ActiveIf(".optimizer_cpu_offload")]
    overlap_cpu_optimizer_d2h_h2d: bool


@dataclass(frozen=True, config=STRICT)
class SchedulerConfig:
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"]
    lr_decay_iters: Annotated[PositiveInt, ActiveIf(".lr_decay_style", "linear", "cosine", "inverse-square-root")]
    lr_warmup_iters: NonNegativeInt
    lr_warmup_init: Annotated[NonNegativeFloat, ActiveIf(".lr_warmup_iters")]


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
    bucket_size: Annotated[PositiveInt | None, ActiveIf(".overlap_grad_reduce")]


@dataclass(frozen=True, config=STRICT)
class MegatronConfig:
    tensor_model_parallel_size: PositiveInt
    pipeline_model_parallel_size: PositiveInt
    num_layers_in_first_pipeline_stage: Annotated[
        PositiveInt | None, ActiveIf(".pipeline_model_parallel_size", above=1)
    ]
    num_layers_in_last_pipeline_stage: Annotated[PositiveInt | None, ActiveIf(".pipeline_model_parallel_size", above=1)]
    context_parallel_size: PositiveInt
    cp_comm_type: Annotated[Literal["p2p", "a2a"], ActiveIf(".context_parallel_size", above=1)]
    expert_model_parallel_size: PositiveInt
    sequence_parallel: bool
    freeze_moe_router: bool
    moe_router_dtype: Literal["fp32", "fp64"] | None
    moe_router_bias_update_rate: NonNegativeFloat
    moe_grouped_gemm: Annotated[bool, ActiveIf("GPUs")]
    moe_permute_fusion: Annotated[bool, ActiveIf("GPUs")]
    moe_router_fusion: Annotated[bool, ActiveIf("GPUs")]
    cuda_graph_impl: Annotated[Literal["none", "full_iteration"], ActiveIf("GPUs")]
    activation_checkpointing: bool
    fine_grained_activation_offloading: bool
    offload_modules: Annotated[list[OffloadModule] | None, ActiveIf(".fine_grained_activation_offloading")]
    activation_offload_fraction: Annotated[Fraction, ActiveIf(".fine_grained_activation_offloading")]
    keep_logits: bool | Auto
    peft: Annotated[LoraConfig, ActiveIf("policy.megatron_cfg.peft.enabled")]
    distributed_data_parallel_config: Annotated[DataParallelConfig, ActiveIf("data-parallel ranks")]
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig


@dataclass(frozen=True, config=STRICT)
class SequencePackingConfig:
    enabled: bool | Auto
    train_mb_tokens: Annotated[TokenLimit, ActiveIf("batches", "packed")]
    logprob_mb_tokens: Annotated[TokenLimit, ActiveIf("batches", "packed")]


@dataclass(frozen=True, config=STRICT)
class DynamicBatchingConfig:
    enabled: bool
    train_mb_tokens: Annotated[TokenLimit, ActiveIf("batches", "dynamic")]
    logprob_mb_tokens: Annotated[TokenLimit, ActiveIf("batches", "dynamic")]


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
    train_micro_batch_size: Annotated[PositiveInt, ActiveIf("batches", "fixed")]
    logprob_batch_size: Annotated[PositiveInt, ActiveIf("batches", "fixed")]
    sequence_packing: SequencePackingConfig
    dynamic_batching: DynamicBatchingConfig
    sequence_length_round: Annotated[PositiveInt, ActiveIf("batches", "packed", "dynamic")]
    max_total_sequence_length: PositiveInt
    router_replay: Annotated[RouterReplayConfig, ActiveIf("an algorithm that generates")]
    max_grad_norm: PositiveFloat | None
    max_skipped_steps: PositiveInt
    offload_optimizer_states_for_logprob: Annotated[bool, ActiveIf("GPUs"), ActiveIf("phases without the optimizer")]
    offload_for_generation: Annotated[list[OffloadedComponent] | Auto, ActiveIf("GPUs")]
    use_pinned_optimizer_offload: Annotated[bool, ActiveIf("GPUs")]
    overlap_offload: Annotated[bool, ActiveIf("GPUs")]
    megatron_cfg: MegatronConfig


@dataclass(frozen=True, config=STRICT)
class TeacherParallelConfig:
    """The keys of `MegatronConfig` that a model has which does not train."""

    tensor_model_parallel_size: PositiveInt
    pipeline_model_parallel_size: PositiveInt
    num_layers_in_first_pipeline_stage: Annotated[
        PositiveInt | None, ActiveIf(".pipeline_model_parallel_size", above=1)
    ]
    num_layers_in_last_pipeline_stage: Annotated[PositiveInt | None, ActiveIf(".pipeline_model_parallel_size", above=1)]
    expert_model_parallel_size: PositiveInt
    sequence_parallel: bool
    moe_router_dtype: Literal["fp32", "fp64"] | None


@dataclass(frozen=True, config=STRICT)
class TeacherConfig:
    """The keys of `PolicyConfig` that may be others for a teacher."""

    model_name: Annotated[str, Field(min_length=1)] | None
    precision: Precision
    logprob_batch_size: Annotated[PositiveInt, ActiveIf("batches", "fixed")]
    logprob_mb_tokens: Annotated[TokenLimit, ActiveIf("batches", "packed", "dynamic")]
    offload: bool
    megatron_cfg: TeacherParallelConfig
