"""The shape of a configuration: types and ranges only.

`configs/` is the only source of defaults, but for parts of what users add to it. Dataclasses are frozen, so that what a
run records is what it ran with.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

PositiveInt = Annotated[int, Field(gt=0)]
# The range that numpy accepts, and therefore vLLM.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# A time that a process or a phase needs at least.
Seconds = Annotated[float, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
# A dotted path, or a file and a name in it.
USER_CODE = r"^(\w+(\.\w+)+|.+\.py:\w+)$"
DURATION = r"^(\d+:){1,3}\d{1,2}$"
# The name is part of a path, so it must not lead to another folder.
RUN_NAME = r"^[^./\\\s][^/\\]{0,199}$"
UserCode = Annotated[str, Field(pattern=USER_CODE)]
Precision = Literal["float32", "bfloat16"]
# Parts of a layer whose inputs can be kept in host memory until the backward pass.
OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp", "expert_fc1", "moe_act"]
# Linear layers that can have an adapter.
LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
# Components that can leave the GPU while the engines generate.
OffloadedComponent = Literal["parameters", "gradients", "optimizer_states"]
# `auto`: what fits the GPUs decides when the run starts (`config.automatic`).
Auto = Literal["auto"]
TokenLimit = PositiveInt | Auto


@dataclass(frozen=True, config=STRICT)
class LossConfig:
    policy_loss: Literal["clip", "clip_cov", "kl_cov", "cispo", "sapo", "reinforce"]
    ratio_clip_min: Annotated[float, Field(ge=0, le=1)]
    ratio_clip_max: NonNegativeFloat
    ratio_clip_c: Annotated[float, Field(gt=1)] | None
    sapo_temperature_pos: PositiveFloat
    sapo_temperature_neg: PositiveFloat
    clip_cov_ratio: Fraction
    clip_cov_lb: float
    clip_cov_ub: float
    kl_cov_ratio: Fraction
    ppo_kl_coef: NonNegativeFloat
    top_entropy_quantile: Fraction
    positive_example_nll_weight: NonNegativeFloat
    entropy_coef: NonNegativeFloat
    reference_policy_kl_penalty: NonNegativeFloat
    reference_policy_kl_type: Literal["k1", "k2", "k3"]
    use_kl_in_reward: bool
    use_bias_correction_kl: bool
    kl_input_clamp_value: PositiveFloat | None
    kl_output_clamp_value: PositiveFloat | None
    token_level_loss: bool | Literal["constant"]
    constant_length: PositiveInt
    force_on_policy_ratio: bool | None
    sequence_level_importance_ratios: bool | Literal["token"]
    use_importance_sampling_correction: bool
    importance_sampling_correction_level: Literal["token", "sequence"] | None
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"]
    truncated_importance_sampling_ratio: Annotated[float, Field(ge=1)] | None
    truncated_importance_sampling_ratio_min: Annotated[float, Field(gt=0, le=1)] | None
    sequence_rejection_ratio: Annotated[float, Field(ge=1)] | None
    sequence_rejection_ratio_min: Annotated[float, Field(gt=0, le=1)] | None
    token_veto_ratio: Annotated[float, Field(gt=0, lt=1)] | None

    @property
    def correction_level(self) -> Literal["token", "sequence"]:
        """What has a weight of its own in the importance sampling correction."""
        own = "sequence" if self.sequence_level_importance_ratios else "token"
        return self.importance_sampling_correction_level or own


@dataclass(frozen=True, config=STRICT)
class AlgorithmConfig:
    """Options of every algorithm."""

    name: str
    seed: Seed
    loss: UserCode | None
    loss_kwargs: dict[str, Any]
    max_num_steps: PositiveInt | None
    val_metric: str
    higher_is_better: bool
    val_period: NonNegativeInt
    val_at_start: bool
    val_at_end: bool
    max_val_samples: PositiveInt


@dataclass(frozen=True, config=STRICT)
class RolloutAlgorithmConfig(AlgorithmConfig):
    """Options of the algorithms that train on what engines generate."""

    max_num_steps: PositiveInt
    num_prompts_per_step: PositiveInt
    num_generations_per_prompt: PositiveInt
    val_temperature: NonNegativeFloat
    val_samples_per_problem: PositiveInt


@dataclass(frozen=True, config=STRICT)
class RewardShapingConfig:
    overlong_buffer_length: PositiveInt | None
    overlong_buffer_penalty: NonNegativeFloat


@dataclass(frozen=True, config=STRICT)
class RolloutsConfig:
    source: Literal["on_policy", "one_step_off", "queue"]
    max_trajectory_age_steps: Annotated[int, Field(ge=1, le=64)]
    in_flight_weight_updates: bool
    save_begun: bool


@dataclass(frozen=True, config=STRICT)
class GRPOConfig(RolloutAlgorithmConfig):
    name: Literal["grpo"]
    use_dynamic_sampling: bool
    oversample: Annotated[float, Field(ge=1, le=8)]
    dynamic_sampling_max_gen_batches: Annotated[float, Field(ge=1)]
    rest_epochs: Annotated[int, Field(ge=0, le=1024)]
    rollouts: RolloutsConfig
    overlong_filtering: bool
    reward_shaping: RewardShapingConfig
    val_metric: Literal["accuracy", "pass_at_k", "avg_length"]
    use_leave_one_out_baseline: bool | Literal["batch"]
    normalize_rewards: bool | Literal["batch", "advantages", "parts"]
    advantage_clip_low: Annotated[float, Field(lt=0)] | None
    advantage_clip_high: PositiveFloat | None
    loss_fn: LossConfig


@dataclass(frozen=True, config=STRICT)
class DistillationLossConfig(LossConfig):
    """GRPO's, for sampled tokens; and the KL over the teacher's largest logits."""

    reward_coef: NonNegativeFloat
    kl_type: Literal["forward", "reverse", "mixed"]
    mixed_kl_weight: Annotated[float, Field(ge=0, le=1)]
    zero_outside_topk: bool


@dataclass(frozen=True, config=STRICT)
class DistillationConfig(GRPOConfig):
    """The options of GRPO, whose loop it has, and those of what a teacher says."""

    name: Literal["distillation"]  # pyrefly: ignore  # another name than GRPO's
    topk_logits_k: Annotated[int, Field(gt=0, le=65536)] | None
    loss_fn: DistillationLossConfig


@dataclass(frozen=True, config=STRICT)
class SupervisedConfig(AlgorithmConfig):
    """Options of the algorithms that train on a data set."""

    max_num_epochs: PositiveInt | None
    early_stop_patience: PositiveInt | None


@dataclass(frozen=True, config=STRICT)
class SFTConfig(SupervisedConfig):
    name: Literal["sft"]
    val_metric: Literal["val_loss"]


@dataclass(frozen=True, config=STRICT)
class DPOConfig(SupervisedConfig):
    name: Literal["dpo"]
    val_metric: Literal[
        "val_loss", "accuracy", "sft_loss", "preference_loss", "rewards_margin_mean", "rewards_chosen_mean"
    ]
    preference_loss: Literal[
        "dpo", "ipo", "hinge", "robust", "exo_pair", "sppo_hard", "nca_pair", "bco_pair", "apo_zero", "apo_down"
    ]
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
    f_alpha_divergence_coef: Annotated[float, Field(ge=0, le=1)]
    reference_policy_kl_penalty: PositiveFloat
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
    preference_average_log_probs: bool
    preference_loss_weight: PositiveFloat
    sft_loss_weight: NonNegativeFloat
    sft_average_log_probs: bool


@dataclass(frozen=True, config=STRICT)
class ORPOConfig(SupervisedConfig):
    name: Literal["orpo"]
    val_metric: Literal[
        "val_loss", "accuracy", "sft_loss", "preference_loss", "rewards_margin_mean", "rewards_chosen_mean"
    ]
    preference_loss_weight: PositiveFloat


@dataclass(frozen=True, config=STRICT)
class KTOConfig(SupervisedConfig):
    name: Literal["kto"]
    val_metric: Literal["val_loss", "rewards_margin_mean", "rewards_chosen_mean"]
    preference_loss: Literal["kto", "apo_zero_unpaired"]
    reference_policy_kl_penalty: PositiveFloat
    desirable_weight: PositiveFloat
    undesirable_weight: PositiveFloat


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
class PolicyConfig:
    model_name: Annotated[str, Field(min_length=1)]
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


@dataclass(frozen=True, config=STRICT)
class VLLMConfig:
    tensor_parallel_size: PositiveInt
    enforce_eager: bool
    max_num_seqs: PositiveInt
    gpu_memory_utilization: Fraction | Auto
    cpu_kv_cache_gib: PositiveInt
    recompute_kv_cache_after_weight_updates: bool
    lora: Literal["merged", "adapters"]


@dataclass(frozen=True, config=STRICT)
class GenerationResources:
    num_nodes: PositiveInt | None
    gpus_per_node: PositiveInt | None


@dataclass(frozen=True, config=STRICT)
class ColocationConfig:
    enabled: bool
    sleep: bool | Auto
    resources: GenerationResources


@dataclass(frozen=True, config=STRICT)
class ServeConfig:
    enabled: bool
    host: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(gt=0, lt=2**16)] | None


@dataclass(frozen=True, config=STRICT)
class GenerationConfig:
    backend: Literal["vllm", "transformers"]
    colocated: ColocationConfig
    data_parallel_size: PositiveInt | None
    max_new_tokens: PositiveInt
    temperature: PositiveFloat
    top_p: Fraction
    top_k: PositiveInt | None
    stop_token_ids: list[NonNegativeInt]
    stop_strings: list[str]
    serve: ServeConfig
    vllm_cfg: VLLMConfig
    vllm_kwargs: dict[str, Any]


@dataclass(frozen=True, config=STRICT)
class RefitConfig:
    buffer_memory_ratio: Fraction
    bucket_bytes: PositiveInt | None
    num_buffers: Annotated[int, Field(ge=1, le=8)]
    direct: bool
    verify: Literal["off", "sample", "full"]
    timeout_s: Seconds


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    name: str
    train_path: str | None
    validation_path: str | None
    path: str | None
    subset: str | None
    train_split: str
    validation_split: str | None
    task: str | None
    task_kwargs: dict[str, Any]
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    prompt_column: str
    prompt_template: str | None
    answer_column: str | None
    answer_pattern: str | None
    response_column: str | None
    messages_column: str | None
    tools_column: str | None
    train_on: Literal["all", "last"]
    chosen_column: str
    rejected_column: str
    label_column: str
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
    batch_size: PositiveInt | None
    terms: dict[Annotated[str, Field(pattern=r"^\w+$")], RewardTerm]
    timeout_s: PositiveFloat | None
    processes: Annotated[int, Field(gt=0, le=4096)]
    concurrency: Annotated[int, Field(gt=0, le=4096)]
    max_error_share: Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class EnvironmentConfig:
    name: Annotated[str, Field(min_length=1)] | None
    max_turns: PositiveInt
    timeout_s: PositiveFloat | None
    concurrency: PositiveInt
    processes: Annotated[int, Field(gt=0, le=4096)]
    max_error_share: Annotated[float, Field(ge=0, le=1)]
    kwargs: dict[str, Any]


@dataclass(frozen=True, config=STRICT)
class AgentConfig:
    name: Annotated[str, Field(min_length=1)] | None
    timeout_s: PositiveFloat | None
    concurrency: PositiveInt
    processes: Annotated[int, Field(gt=0, le=4096)]
    max_error_share: Annotated[float, Field(ge=0, le=1)]
    kwargs: dict[str, Any]


@dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    num_nodes: PositiveInt
    gpus_per_node: NonNegativeInt
    cpu_ranks: PositiveInt
    threads_per_worker: PositiveInt | None
    numa_binding: bool
    start_timeout_s: Seconds
    collective_timeout_s: Seconds
    phase_timeout_s: Seconds | None
    max_restarts: NonNegativeInt


@dataclass(frozen=True, config=STRICT)
class WandbConfig:
    project: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)] | None
    entity: str | None
    mode: Literal["online", "offline"]


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
    mismatch_warning: Annotated[float, Field(ge=1)]
    log_samples: NonNegativeInt | None
    show_samples_period: NonNegativeInt
    wandb: WandbConfig
    mlflow: MLflowConfig


@dataclass(frozen=True, config=STRICT)
class ProfileConfig:
    steps: list[PositiveInt]
    tool: Literal["torch", "nsys"]


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    save_period: NonNegativeInt
    async_save: bool
    resume_layouts: Literal["any", "data_parallel"]
    keep_newest: PositiveInt
    keep_best: NonNegativeInt
    must_save_by: PositiveInt | Annotated[str, Field(pattern=DURATION)] | None
    resume_from: Annotated[str, Field(min_length=1)] | None
    export_hf_at_end: bool


@dataclass(frozen=True, config=STRICT)
class Config:
    run_name: Annotated[str, Field(pattern=RUN_NAME)]
    algorithm: Annotated[
        GRPOConfig | SFTConfig | DPOConfig | ORPOConfig | KTOConfig | DistillationConfig, Field(discriminator="name")
    ]
    policy: PolicyConfig
    teacher: TeacherConfig
    generation: GenerationConfig
    refit: RefitConfig
    data: DataConfig
    reward: RewardConfig
    environment: EnvironmentConfig
    agent: AgentConfig
    cluster: ClusterConfig
    logger: LoggerConfig
    profile: ProfileConfig
    checkpoint: CheckpointConfig

    def options[T: AlgorithmConfig](self, kind: type[T]) -> T:
        """The algorithm's options, which the caller knows to be of `kind`. Raises TypeError: they are not."""
        if not isinstance(self.algorithm, kind):
            raise TypeError(f"{kind.__name__} expected, this run has {type(self.algorithm).__name__}")
        return self.algorithm
