"""The schema of a configuration: types, ranges, and conditions for an effect. Algorithms are in `schema_algorithm`.

`configs/` is the only source of defaults, except for reward terms that users add. Dataclasses are frozen, so a run's
record matches its configuration.
"""

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_rl_lite.config.schema_algorithm import (
    DURATION,
    RUN_NAME,
    SOURCE_NAME,
    STRICT,
    ActiveIf,
    AlgorithmConfig,
    Auto,
    DistillationConfig,
    DPOConfig,
    Fraction,
    GRPOConfig,
    JoinedByCommas,
    KTOConfig,
    NoneIsOff,
    NonNegativeFloat,
    NonNegativeInt,
    NullIsEmpty,
    ORPOConfig,
    PositiveFloat,
    PositiveInt,
    Seconds,
    SFTConfig,
)


@dataclass(frozen=True, config=STRICT)
class VLLMConfig:
    tensor_parallel_size: PositiveInt
    pipeline_parallel_size: PositiveInt
    expert_parallel: Annotated[bool, ActiveIf("generation.backend", "vllm"), ActiveIf("tensor-parallel engines")]
    enforce_eager: Annotated[bool, ActiveIf("generation.backend", "vllm"), ActiveIf("GPUs")]
    max_num_seqs: PositiveInt
    gpu_memory_utilization: Annotated[Fraction | Auto, ActiveIf("generation.backend", "vllm"), ActiveIf("GPUs")]
    cpu_kv_cache_gib: Annotated[PositiveInt, ActiveIf("generation.backend", "vllm"), ActiveIf("CPUs")]
    recompute_kv_cache_after_weight_updates: Annotated[
        bool,
        ActiveIf("generation.backend", "vllm"),
        ActiveIf("algorithm.rollouts.in_flight_weight_updates"),
        ActiveIf("algorithm.rollouts.source", "queue"),
    ]
    lora: Annotated[
        Literal["merged", "adapters"],
        ActiveIf("generation.backend", "vllm"),
        ActiveIf("policy.megatron_cfg.peft.enabled"),
    ]


@dataclass(frozen=True, config=STRICT)
class GenerationResources:
    num_nodes: PositiveInt | None
    gpus_per_node: PositiveInt | None


@dataclass(frozen=True, config=STRICT)
class ColocationConfig:
    enabled: bool
    sleep: Annotated[bool | Auto, ActiveIf(".enabled"), ActiveIf("vLLM on GPUs, or a queue of rollouts")]
    resources: Annotated[GenerationResources, ActiveIf(".enabled", False), ActiveIf("GPUs")]


@dataclass(frozen=True, config=STRICT)
class ServeConfig:
    enabled: bool
    host: Annotated[str, Field(min_length=1), ActiveIf("an endpoint")]
    port: Annotated[Annotated[int, Field(gt=0, lt=2**16)] | None, ActiveIf("an endpoint")]


@dataclass(frozen=True, config=STRICT)
class GenerationConfig:
    backend: Literal["vllm", "transformers"]
    colocated: ColocationConfig
    data_parallel_size: Annotated[PositiveInt | None, ActiveIf("CPUs")]
    min_engines: Annotated[PositiveInt | None, ActiveIf("generation.colocated.enabled", False)]
    max_new_tokens: PositiveInt
    temperature: PositiveFloat
    top_p: Fraction
    top_k: Annotated[PositiveInt | None, NoneIsOff]
    min_p: Annotated[float, Field(ge=0, le=1)]
    stop_token_ids: Annotated[list[NonNegativeInt], NullIsEmpty]
    stop_strings: Annotated[list[str], NullIsEmpty]
    speculation: Annotated[
        Literal["ngram", "eagle3", "mtp", "draft_model"] | None, ActiveIf("generation.backend", "vllm")
    ]
    draft_model: Annotated[
        Annotated[str, Field(min_length=1)] | None, ActiveIf("generation.speculation", "eagle3", "draft_model")
    ]
    draft_tokens: Annotated[PositiveInt, ActiveIf("generation.speculation")]
    pause_drafts: Annotated[bool, ActiveIf("generation.backend", "vllm")]
    continue_responses: Annotated[bool, ActiveIf("generation.backend", "vllm")]
    max_gen_kl: Annotated[PositiveFloat | None, ActiveIf("algorithm.rollouts.source", "on_policy")]
    serve: ServeConfig
    vllm_cfg: VLLMConfig
    vllm_kwargs: Annotated[dict[str, Any], ActiveIf("generation.backend", "vllm")]


@dataclass(frozen=True, config=STRICT)
class RefitConfig:
    buffer_memory_ratio: Annotated[Fraction, ActiveIf(".bucket_bytes", None)]
    bucket_bytes: PositiveInt | None
    num_buffers: Annotated[int, Field(ge=1, le=8), ActiveIf("generation.colocated.enabled", False)]
    cuda_ipc: Annotated[bool, ActiveIf("generation.colocated.enabled"), ActiveIf("GPUs")]
    verify: Literal["off", "sample", "full"]
    timeout_s: Seconds


Precision = Literal["float32", "bfloat16"]

# Modules whose inputs can be offloaded until the backward pass.
OffloadModule = Literal[
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "mlp",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
]
# Parts of a layer that selective recomputation can recompute.
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]
# Linear layers that can have an adapter. Those of queries, keys and values depend on the model's attention.
LoraTarget = Literal[
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
]
# Components that can be offloaded while engines generate.
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
    use_precision_aware_optimizer: Annotated[bool, ActiveIf("GPUs"), ActiveIf(".optimizer_cpu_offload", False)]
    exp_avg_dtype: Annotated[Precision, ActiveIf(".use_precision_aware_optimizer")]
    exp_avg_sq_dtype: Annotated[Precision, ActiveIf(".use_precision_aware_optimizer")]
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
    target_modules: list[LoraTarget]


@dataclass(frozen=True, config=STRICT)
class DataParallelConfig:
    grad_reduce_in_fp32: Annotated[bool, ActiveIf("policy.precision", "bfloat16")]
    overlap_grad_reduce: Annotated[bool | Auto, ActiveIf("data-parallel ranks")]
    overlap_param_gather: Annotated[bool | Auto, ActiveIf("data-parallel ranks")]
    bucket_size: Annotated[PositiveInt | None, ActiveIf("data-parallel ranks"), ActiveIf(".overlap_grad_reduce")]


@dataclass(frozen=True, config=STRICT)
class FP8Config:
    enabled: bool
    fp8: Literal["e4m3", "hybrid"]
    fp8_recipe: Literal["blockwise", "tensorwise", "mxfp8"]


# Conditions of keys for recomputation of complete layers.
OF_LAYERS = ActiveIf(".activation_checkpointing"), ActiveIf(".recompute_granularity", "full")
StageLayers = Annotated[PositiveInt | None, ActiveIf(".pipeline_model_parallel_size", above=1)]


@dataclass(frozen=True, config=STRICT)
class TeacherParallelConfig:
    tensor_model_parallel_size: PositiveInt
    pipeline_model_parallel_size: PositiveInt
    num_layers_in_first_pipeline_stage: StageLayers
    num_layers_in_last_pipeline_stage: StageLayers
    expert_model_parallel_size: PositiveInt
    sequence_parallel: Annotated[bool, ActiveIf(".tensor_model_parallel_size", above=1)]
    moe_router_dtype: Literal["fp32", "fp64"] | None


@dataclass(frozen=True, config=STRICT)
class MegatronConfig(TeacherParallelConfig):
    virtual_pipeline_model_parallel_size: StageLayers
    context_parallel_size: PositiveInt
    cp_comm_type: Annotated[Literal["p2p", "a2a"], ActiveIf(".context_parallel_size", above=1)]
    hybrid_context_parallel: Annotated[bool, ActiveIf(".context_parallel_size", above=1)]
    expert_tensor_parallel_size: PositiveInt
    freeze_moe_router: bool
    moe_router_bias_update_rate: NonNegativeFloat
    moe_grouped_gemm: Annotated[bool, ActiveIf("GPUs")]
    moe_permute_fusion: Annotated[bool, ActiveIf("GPUs")]
    moe_router_fusion: Annotated[bool, ActiveIf("GPUs")]
    moe_token_dispatcher_type: Annotated[Literal["alltoall", "flex"], ActiveIf("GPUs")]
    moe_flex_dispatcher_backend: Annotated[
        Literal["deepep", "hybridep"], ActiveIf("GPUs"), ActiveIf(".moe_token_dispatcher_type", "flex")
    ]
    moe_shared_expert_overlap: Annotated[bool, ActiveIf("GPUs")]
    gradient_accumulation_fusion: Annotated[bool, ActiveIf("GPUs"), ActiveIf("policy.megatron_cfg.peft.enabled", False)]
    cuda_graph_impl: Annotated[Literal["none", "full_iteration"], ActiveIf("GPUs")]
    activation_checkpointing: bool
    recompute_granularity: Annotated[Literal["full", "selective"], ActiveIf(".activation_checkpointing")]
    recompute_modules: Annotated[
        Annotated[list[RecomputeModule], Field(min_length=1)] | None,
        ActiveIf(".activation_checkpointing"),
        ActiveIf(".recompute_granularity", "selective"),
    ]
    recompute_method: Annotated[Literal["uniform", "block"], *OF_LAYERS]
    recompute_num_layers: Annotated[PositiveInt, *OF_LAYERS]
    fine_grained_activation_offloading: bool
    offload_modules: Annotated[list[OffloadModule] | None, ActiveIf(".fine_grained_activation_offloading")]
    activation_offload_fraction: Annotated[Fraction, ActiveIf(".fine_grained_activation_offloading")]
    keep_logits: bool | Auto
    peft: Annotated[LoraConfig, ActiveIf("policy.megatron_cfg.peft.enabled")]
    fp8_cfg: Annotated[FP8Config, ActiveIf("GPUs"), ActiveIf("policy.megatron_cfg.fp8_cfg.enabled")]
    distributed_data_parallel_config: DataParallelConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    model_overrides: dict[str, Any]


@dataclass(frozen=True, config=STRICT)
class SequencePackingConfig:
    enabled: bool | Auto
    shared_prompts: Annotated[bool | Auto, ActiveIf("batches", "packed")]
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
    max_grad_norm: Annotated[PositiveFloat | None, NoneIsOff]
    max_skipped_steps: PositiveInt
    offload_optimizer_states_for_logprob: Annotated[bool, ActiveIf("GPUs"), ActiveIf("phases without the optimizer")]
    offload_for_generation: Annotated[list[OffloadedComponent] | Auto, ActiveIf("GPUs")]
    use_pinned_optimizer_offload: Annotated[bool, ActiveIf("GPUs")]
    overlap_offload: Annotated[bool, ActiveIf("GPUs")]
    megatron_cfg: MegatronConfig


@dataclass(frozen=True, config=STRICT)
class TeacherConfig:
    """The keys of `PolicyConfig` that a teacher has separately."""

    model_name: Annotated[str, Field(min_length=1)] | None
    precision: Precision
    logprob_batch_size: Annotated[PositiveInt, ActiveIf("batches", "fixed")]
    logprob_mb_tokens: Annotated[TokenLimit, ActiveIf("batches", "packed", "dynamic")]
    offload: bool
    megatron_cfg: TeacherParallelConfig


@dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    num_nodes: PositiveInt
    gpus_per_node: NonNegativeInt
    cpu_ranks: Annotated[PositiveInt, ActiveIf("CPUs")]
    threads_per_worker: PositiveInt | None
    numa_binding: Annotated[bool, ActiveIf("GPUs")]
    start_timeout_s: Seconds
    collective_timeout_s: Seconds
    phase_timeout_s: Seconds | None
    max_restarts: NonNegativeInt


@dataclass(frozen=True, config=STRICT)
class WandbConfig:
    project: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)] | None
    entity: str | None
    mode: Literal["online", "offline", "disabled"]


@dataclass(frozen=True, config=STRICT)
class MLflowConfig:
    tracking_uri: Annotated[str, Field(min_length=1)]
    experiment: Annotated[str, Field(min_length=1)]
    name: str | None


@dataclass(frozen=True, config=STRICT)
class LoggerConfig:
    wandb_enabled: bool
    tensorboard_enabled: bool
    mlflow_enabled: bool
    plots: bool
    mismatch_warning: Annotated[float, Field(ge=1), ActiveIf("an algorithm that generates")]
    log_samples: Annotated[NonNegativeInt | None, ActiveIf("an algorithm that generates")]
    show_samples_period: Annotated[NonNegativeInt, ActiveIf("an algorithm that generates")]
    wandb: Annotated[WandbConfig, ActiveIf(".wandb_enabled")]
    mlflow: Annotated[MLflowConfig, ActiveIf(".mlflow_enabled")]


@dataclass(frozen=True, config=STRICT)
class ProfileConfig:
    steps: Annotated[list[PositiveInt], NullIsEmpty]
    tool: Annotated[Literal["torch", "nsys"], ActiveIf(".steps")]


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    save_period: NonNegativeInt
    async_save: Annotated[bool, ActiveIf(".save_period")]
    keep_newest: Annotated[PositiveInt, ActiveIf(".save_period")]
    keep_best: Annotated[NonNegativeInt, ActiveIf(".save_period"), ActiveIf("validations")]
    must_save_by: Annotated[
        PositiveInt | Annotated[str, Field(pattern=DURATION, description="duration")] | None, ActiveIf(".save_period")
    ]
    resume_from: Annotated[str, Field(min_length=1)] | None
    export_hf_at_end: bool
    push_to_hub: str | None
    hub_private_repo: Annotated[bool, ActiveIf(".push_to_hub")]

    @property
    def exports(self) -> bool:
        """Return whether the run writes the trained model at its end."""
        return self.export_hf_at_end or self.push_to_hub is not None


@dataclass(frozen=True, config=STRICT)
class DataSetConfig:
    name: str
    train_path: Annotated[str | None, JoinedByCommas, ActiveIf(".name", "file")]
    validation_path: Annotated[str | None, JoinedByCommas, ActiveIf(".name", "file")]
    path: Annotated[str | None, ActiveIf(".name", "hub")]
    subset: Annotated[str | None, ActiveIf(".name", "hub")]
    train_split: Annotated[str, ActiveIf(".name", "hub")]
    validation_split: Annotated[str | None, ActiveIf(".name", "hub")]
    task: Annotated[str | None, ActiveIf(".name", "reasoning_gym")]
    task_kwargs: dict[str, Any]
    map: Annotated[str | None, ActiveIf(".name", "file", "hub")]
    max_samples: Annotated[PositiveInt | None, ActiveIf(".name", "file", "hub")]
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    prompt_column: str
    prompt_template: str | None
    answer_column: str | None
    answer_pattern: Annotated[str | None, ActiveIf("as data", "problems")]
    response_column: str | None
    messages_column: str | None
    tools_column: str | None
    train_on: Annotated[Literal["all", "last"], ActiveIf("as data", "chats")]
    chosen_column: Annotated[str, ActiveIf("as data", "pairs")]
    rejected_column: Annotated[str, ActiveIf("as data", "pairs")]
    label_column: Annotated[str, ActiveIf("as data", "unpaired")]
    system_prompt: str | None
    min_reward: float | None
    shuffle: bool
    too_long: Literal["error", "drop", "truncate"]


@dataclass(frozen=True, config=STRICT)
class RewardTerm:
    name: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(allow_inf_nan=False)]
    kwargs: dict[str, Any] = Field(default_factory=dict)
    batch_size: PositiveInt | None = None


@dataclass(frozen=True, config=STRICT)
class RewardConfig:
    name: Annotated[str, Field(min_length=1)]
    kwargs: dict[str, Any]
    binary: bool | None
    batch_size: PositiveInt | None
    terms: dict[Annotated[str, Field(pattern=r"^\w+$")], RewardTerm]
    timeout_s: PositiveFloat | None
    processes: Annotated[int, Field(gt=0, le=4096), ActiveIf(".timeout_s")]
    concurrency: Annotated[int, Field(gt=0, le=4096), ActiveIf(".timeout_s")]
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class AgentConfig:
    name: Annotated[str, Field(min_length=1)] | None
    timeout_s: PositiveFloat | None
    concurrency: PositiveInt
    processes: Annotated[int, Field(gt=0, le=4096)]
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)]
    kwargs: dict[str, Any]


@dataclass(frozen=True, config=STRICT)
class EnvironmentConfig(AgentConfig):
    max_turns: PositiveInt


@dataclass(frozen=True, config=STRICT)
class SourceTeacherConfig:
    model_name: Annotated[str, Field(min_length=1)] | None


@dataclass(frozen=True, config=STRICT)
class SourceConfig(DataSetConfig):
    """The keys of `data` for one source of a mixture, and those that it has instead of the run's. Composition fills
    them in."""

    weight: NonNegativeFloat | dict[Literal["step", "solve_rate"], dict[float, NonNegativeFloat]]
    reward: RewardConfig
    environment: EnvironmentConfig
    agent: AgentConfig
    teacher: SourceTeacherConfig
    max_new_tokens: PositiveInt


@dataclass(frozen=True, config=STRICT)
class DataConfig(DataSetConfig):
    sources: dict[Annotated[str, Field(pattern=SOURCE_NAME)], SourceConfig]


@dataclass(frozen=True, config=STRICT)
class Config:
    run_name: Annotated[str, Field(pattern=RUN_NAME, description="folder name")]
    algorithm: Annotated[
        GRPOConfig | SFTConfig | DPOConfig | ORPOConfig | KTOConfig | DistillationConfig, Field(discriminator="name")
    ]
    policy: PolicyConfig
    teacher: Annotated[TeacherConfig, ActiveIf("a teacher")]
    generation: Annotated[GenerationConfig, ActiveIf("an algorithm that generates")]
    refit: Annotated[RefitConfig, ActiveIf("an algorithm that generates")]
    data: DataConfig
    reward: Annotated[RewardConfig, ActiveIf("an algorithm that generates")]
    environment: Annotated[EnvironmentConfig, ActiveIf("an algorithm that generates"), ActiveIf("environment.name")]
    agent: Annotated[AgentConfig, ActiveIf("an algorithm that generates"), ActiveIf("agent.name")]
    cluster: ClusterConfig
    logger: LoggerConfig
    profile: ProfileConfig
    checkpoint: CheckpointConfig

    def options[T: AlgorithmConfig](self, kind: type[T]) -> T:
        """Return the algorithm's options as a `kind`. Raises TypeError: they have another type."""
        if not isinstance(self.algorithm, kind):
            raise TypeError(f"{kind.__name__} expected, this run has {type(self.algorithm).__name__}")
        return self.algorithm
