"""Shared types of the schema, and the options of each algorithm."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
PositiveInt = Annotated[int, Field(gt=0)]
# The range that numpy accepts, and therefore vLLM.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# A timeout.
Seconds = Annotated[float, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
# A dotted path, or a file and a name in it.
USER_CODE = r"^(\w+(\.\w+)+|.+\.(py|pkl):\w+)$"
DURATION = r"^(\d+:){1,3}\d{1,2}$"
# The name is part of a path, so it must not lead to another folder.
RUN_NAME = r"^[^./\\\s][^/\\]{0,199}$"
# The name is part of dotted keys and of metrics' names.
SOURCE_NAME = r"^\w[\w-]*$"
# For a list: null is an empty one.
NullIsEmpty = BeforeValidator(lambda value: [] if value is None else value)
# For a path: a list of files is one text with commas.
JoinedByCommas = BeforeValidator(
    lambda value: ",".join(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else value
)
# For a limit: vLLM, verl and TRL write 0 or -1 for none.
NoneIsOff = BeforeValidator(lambda value: None if value in (0, -1) else value)
UserCode = Annotated[str, Field(pattern=USER_CODE, description="dotted path or FILE.py:NAME")]
# `planning.automatic` resolves it when the run starts; for `algorithm.oversample`, see `rollout.collector`.
Auto = Literal["auto"]


class ActiveIf:
    """Metadata of a key or section that has an effect only under a condition. Several must all hold.

    `key` is another key, a key of the same section (`.name`), or a fact of `validation.notes.FACTS`. The condition
    holds with one of `values`; without values, if the key is set, true, and larger than `above`.
    """

    def __init__(self, key: str, *values: object, above: int = 0):
        self.key, self.values, self.above = key, values, above

    def holds(self, value: object) -> bool:
        """Return whether the condition holds, given the value of `key`."""
        if self.values:
            return value in self.values
        return value > self.above if isinstance(value, int | float) else bool(value)

    def __str__(self) -> str:
        if self.values:
            return f"{self.key}={' or '.join('null' if one is None else str(one).lower() for one in self.values)}"
        return f"{self.key}>{self.above}" if self.above else self.key


PreferenceMetric = Literal[
    "val_loss", "accuracy", "sft_loss", "preference_loss", "rewards_margin_mean", "rewards_chosen_mean"
]


@dataclass(frozen=True, config=STRICT)
class LossConfig:
    policy_loss: Literal["clip", "clip_cov", "kl_cov", "cispo", "sapo", "dppo_tv", "dppo_kl", "reinforce"]
    ratio_clip_min: Annotated[float, Field(ge=0, le=1), ActiveIf(".policy_loss", "clip", "clip_cov", "cispo")]
    ratio_clip_max: Annotated[NonNegativeFloat, ActiveIf(".policy_loss", "clip", "clip_cov", "cispo")]
    ratio_clip_c: Annotated[
        Annotated[float, Field(gt=1)] | None, ActiveIf(".policy_loss", "clip", "clip_cov", "dppo_tv", "dppo_kl")
    ]
    sapo_temperature_pos: Annotated[PositiveFloat, ActiveIf(".policy_loss", "sapo")]
    sapo_temperature_neg: Annotated[PositiveFloat, ActiveIf(".policy_loss", "sapo")]
    dppo_mask_low: Annotated[NonNegativeFloat | None, ActiveIf(".policy_loss", "dppo_tv", "dppo_kl")]
    dppo_mask_high: Annotated[NonNegativeFloat | None, ActiveIf(".policy_loss", "dppo_tv", "dppo_kl")]
    clip_cov_ratio: Annotated[Fraction, ActiveIf(".policy_loss", "clip_cov")]
    clip_cov_lb: Annotated[float, ActiveIf(".policy_loss", "clip_cov")]
    clip_cov_ub: Annotated[float, ActiveIf(".policy_loss", "clip_cov")]
    kl_cov_ratio: Annotated[Fraction, ActiveIf(".policy_loss", "kl_cov")]
    ppo_kl_coef: Annotated[NonNegativeFloat, ActiveIf(".policy_loss", "kl_cov")]
    top_entropy_quantile: Fraction
    positive_example_nll_weight: NonNegativeFloat
    entropy_coef: NonNegativeFloat
    reference_policy_kl_penalty: NonNegativeFloat
    reference_policy_kl_type: Annotated[Literal["k1", "k2", "k3"], ActiveIf(".reference_policy_kl_penalty")]
    use_kl_in_reward: Annotated[bool, ActiveIf(".reference_policy_kl_penalty")]
    use_bias_correction_kl: Annotated[
        bool | Literal["on_policy"], ActiveIf(".reference_policy_kl_penalty"), ActiveIf(".use_kl_in_reward", False)
    ]
    kl_input_clamp_value: Annotated[PositiveFloat | None, ActiveIf(".reference_policy_kl_penalty")]
    kl_output_clamp_value: Annotated[PositiveFloat | None, ActiveIf(".reference_policy_kl_penalty")]
    token_level_loss: bool | Literal["constant"]
    constant_length: Annotated[PositiveInt, ActiveIf(".token_level_loss", "constant")]
    force_on_policy_ratio: bool | None
    sequence_level_importance_ratios: Annotated[
        bool | Literal["token"],
        ActiveIf(".policy_loss", "clip", "clip_cov", "kl_cov", "cispo", "sapo", "dppo_tv", "dppo_kl"),
    ]
    use_importance_sampling_correction: bool
    importance_sampling_correction_level: Annotated[
        Literal["token", "sequence"] | None, ActiveIf(".use_importance_sampling_correction")
    ]
    truncated_importance_sampling_type: Annotated[
        Literal["tis", "icepop", "seq-mask-tis"], ActiveIf(".use_importance_sampling_correction")
    ]
    truncated_importance_sampling_ratio: Annotated[float, Field(ge=1)] | None
    truncated_importance_sampling_ratio_min: Annotated[float, Field(gt=0, le=1)] | None
    sequence_rejection_ratio: Annotated[float, Field(ge=1)] | None
    sequence_rejection_ratio_min: Annotated[float, Field(gt=0, le=1)] | None
    token_veto_ratio: Annotated[float, Field(gt=0, lt=1)] | None

    @property
    def correction_level(self) -> Literal["token", "sequence"]:
        """Level of the weights of the importance sampling correction."""
        own = "sequence" if self.sequence_level_importance_ratios else "token"
        return self.importance_sampling_correction_level or own


@dataclass(frozen=True, config=STRICT)
class AlgorithmConfig:
    """Options of every algorithm."""

    name: str
    seed: Seed
    loss: UserCode | None
    loss_kwargs: Annotated[dict[str, Any], ActiveIf(".loss")]
    max_num_epochs: Annotated[PositiveInt | None, ActiveIf("data with epochs")]
    max_num_steps: PositiveInt | None
    val_metric: Annotated[str, ActiveIf("validations")]
    higher_is_better: Annotated[bool, ActiveIf("validations")]
    val_period: NonNegativeInt
    val_at_start: bool
    val_at_end: bool
    max_val_samples: Annotated[PositiveInt, ActiveIf("validations")]


@dataclass(frozen=True, config=STRICT)
class RolloutAlgorithmConfig(AlgorithmConfig):
    """Options of the algorithms that train on generated responses."""

    num_prompts_per_step: PositiveInt
    num_generations_per_prompt: PositiveInt
    val_temperature: Annotated[NonNegativeFloat, ActiveIf("validations")]
    val_samples_per_problem: Annotated[PositiveInt, ActiveIf("validations")]


@dataclass(frozen=True, config=STRICT)
class RewardShapingConfig:
    overlong_buffer_length: PositiveInt | None
    overlong_buffer_penalty: Annotated[NonNegativeFloat, ActiveIf(".overlong_buffer_length")]


@dataclass(frozen=True, config=STRICT)
class RolloutsConfig:
    num_workers: NonNegativeInt | Auto
    source: Literal["on_policy", "one_step_off", "queue"]
    max_trajectory_age_steps: Annotated[int, Field(ge=1, le=64), ActiveIf(".source", "queue")]
    in_flight_weight_updates: Annotated[bool, ActiveIf(".source", "queue")]
    checkpoint_inflight: Annotated[bool, ActiveIf(".source", "one_step_off", "queue")]
    replay: str | None


@dataclass(frozen=True, config=STRICT)
class GRPOConfig(RolloutAlgorithmConfig):
    name: Literal["grpo"]
    use_dynamic_sampling: bool
    oversample: Annotated[Annotated[float, Field(ge=1, le=8)] | Auto, ActiveIf(".use_dynamic_sampling")]
    dynamic_sampling_max_gen_batches: Annotated[float, Field(ge=1), ActiveIf(".use_dynamic_sampling")]
    solved_cooldown_epochs: Annotated[int, Field(ge=0, le=1024)]
    rollouts: RolloutsConfig
    overlong_filtering: bool
    reward_shaping: RewardShapingConfig
    val_metric: Annotated[Literal["accuracy", "pass_at_k", "avg_length"], ActiveIf("validations")]
    use_leave_one_out_baseline: bool | Literal["batch"]
    normalize_rewards: bool | Literal["batch", "advantages", "mean", "parts"]
    pass_at_k: PositiveInt | None
    credit: Annotated[Literal["episode", "turn"], ActiveIf("an environment or agent")]
    turn_discount: Annotated[float, Field(ge=0, le=1), ActiveIf(".credit", "turn")]
    advantage_clip_low: Annotated[float, Field(lt=0)] | None
    advantage_clip_high: PositiveFloat | None
    num_iterations: PositiveInt
    ref_model_sync_steps: Annotated[PositiveInt | None, ActiveIf(".loss_fn.reference_policy_kl_penalty")]
    ref_model_mixup_alpha: Annotated[Fraction, ActiveIf(".ref_model_sync_steps")]
    loss_fn: LossConfig


@dataclass(frozen=True, config=STRICT)
class DistillationLossConfig(LossConfig):
    """GRPO's loss on sampled tokens, and the KL over the teacher's largest logits."""

    reward_coef: NonNegativeFloat
    kl_type: Annotated[Literal["forward", "reverse", "mixed"], ActiveIf("algorithm.topk_logits_k")]
    mixed_kl_weight: Annotated[
        float, Field(ge=0, le=1), ActiveIf("algorithm.topk_logits_k"), ActiveIf(".kl_type", "mixed")
    ]
    zero_outside_topk: Annotated[bool, ActiveIf("algorithm.topk_logits_k")]


@dataclass(frozen=True, config=STRICT)
class DistillationConfig(GRPOConfig):
    """GRPO's options, and those of the teacher."""

    name: Literal["distillation"]  # pyrefly: ignore  # narrows to a different name
    topk_logits_k: Annotated[int, Field(gt=0, le=65536)] | None
    loss_fn: DistillationLossConfig


@dataclass(frozen=True, config=STRICT)
class SupervisedConfig(AlgorithmConfig):
    """Options of the algorithms that train on a data set."""

    early_stop_patience: PositiveInt | None


@dataclass(frozen=True, config=STRICT)
class SFTConfig(SupervisedConfig):
    name: Literal["sft"]
    val_metric: Annotated[Literal["val_loss"], ActiveIf("validations")]


@dataclass(frozen=True, config=STRICT)
class DPOConfig(SupervisedConfig):
    name: Literal["dpo"]
    val_metric: Annotated[PreferenceMetric, ActiveIf("validations")]
    preference_loss: Literal[
        "dpo", "ipo", "hinge", "robust", "exo_pair", "sppo_hard", "nca_pair", "bco_pair", "apo_zero", "apo_down"
    ]
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
    f_alpha_divergence_coef: Annotated[float, Field(ge=0, le=1), ActiveIf(".f_divergence", "alpha_divergence")]
    reference_policy_kl_penalty: PositiveFloat
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
    preference_average_log_probs: bool
    preference_loss_weight: PositiveFloat
    sft_loss_weight: NonNegativeFloat
    sft_average_log_probs: Annotated[bool, ActiveIf(".sft_loss_weight")]


@dataclass(frozen=True, config=STRICT)
class ORPOConfig(SupervisedConfig):
    name: Literal["orpo"]
    val_metric: Annotated[PreferenceMetric, ActiveIf("validations")]
    preference_loss_weight: PositiveFloat


@dataclass(frozen=True, config=STRICT)
class KTOConfig(SupervisedConfig):
    name: Literal["kto"]
    val_metric: Annotated[Literal["val_loss", "rewards_margin_mean", "rewards_chosen_mean"], ActiveIf("validations")]
    preference_loss: Literal["kto", "apo_zero_unpaired"]
    reference_policy_kl_penalty: PositiveFloat
    desirable_weight: PositiveFloat
    undesirable_weight: PositiveFloat
