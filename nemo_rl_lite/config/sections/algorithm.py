"""The options of each algorithm."""

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
    Seed,
    UserCode,
)


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
    oversample: Annotated[float, Field(ge=1, le=8)] | Auto
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
