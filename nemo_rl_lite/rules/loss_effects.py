"""Keys of GRPO's and DPO's loss that have an effect only with other keys of it."""

from dataclasses import fields

from nemo_rl_lite.config.algorithms import compares
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import DistillationConfig, DPOConfig, GRPOConfig, LossConfig
from nemo_rl_lite.rules.loss import reads_ratios
from nemo_rl_lite.rules.step_effects import Effect

_LOSS = "algorithm.loss_fn"


def _loss(config: Config) -> LossConfig:
    return config.options(GRPOConfig).loss_fn


def _distillation(config: Config) -> DistillationConfig:
    return config.options(DistillationConfig)


LOSS_EFFECTS = (
    Effect(
        tuple(f"{_LOSS}.{one.name}" for one in fields(LossConfig)),
        reads_ratios,
        "algorithm.topk_logits_k=null, whose loss is on sampled tokens",
    ),
    Effect(
        (f"{_LOSS}.kl_type", f"{_LOSS}.zero_outside_topk"),
        lambda config: not reads_ratios(config),
        "algorithm.topk_logits_k=64: sampled tokens give the reverse KL",
    ),
    Effect(
        (f"{_LOSS}.mixed_kl_weight",),
        lambda config: not reads_ratios(config) and _distillation(config).loss_fn.kl_type == "mixed",
        f"algorithm.topk_logits_k=64 {_LOSS}.kl_type=mixed",
    ),
    Effect(
        (
            *("algorithm.use_leave_one_out_baseline", "algorithm.normalize_rewards"),
            *("algorithm.advantage_clip_low", "algorithm.advantage_clip_high"),
        ),
        lambda config: getattr(_loss(config), "reward_coef", 1.0) > 0,
        f"{_LOSS}.reward_coef=1.0: the reward is a metric alone",
    ),
    Effect(
        (f"{_LOSS}.ratio_clip_min", f"{_LOSS}.ratio_clip_max"),
        lambda config: _loss(config).policy_loss in ("clip", "clip_cov", "cispo"),
        f"{_LOSS}.policy_loss=clip, clip_cov or cispo",
    ),
    Effect(
        (f"{_LOSS}.ratio_clip_c",),
        lambda config: _loss(config).policy_loss in ("clip", "clip_cov"),
        f"{_LOSS}.policy_loss=clip or clip_cov",
    ),
    Effect(
        (f"{_LOSS}.clip_cov_ratio", f"{_LOSS}.clip_cov_lb", f"{_LOSS}.clip_cov_ub"),
        lambda config: _loss(config).policy_loss == "clip_cov",
        f"{_LOSS}.policy_loss=clip_cov",
    ),
    Effect(
        (f"{_LOSS}.kl_cov_ratio", f"{_LOSS}.ppo_kl_coef"),
        lambda config: _loss(config).policy_loss == "kl_cov",
        f"{_LOSS}.policy_loss=kl_cov",
    ),
    Effect(
        (f"{_LOSS}.sapo_temperature_pos", f"{_LOSS}.sapo_temperature_neg"),
        lambda config: _loss(config).policy_loss == "sapo",
        f"{_LOSS}.policy_loss=sapo",
    ),
    Effect(
        (f"{_LOSS}.sequence_level_importance_ratios",),
        lambda config: _loss(config).policy_loss != "reinforce",
        f"{_LOSS}.policy_loss=clip: reinforce has no ratio",
    ),
    Effect(
        (f"{_LOSS}.constant_length",),
        lambda config: _loss(config).token_level_loss == "constant",
        f"{_LOSS}.token_level_loss=constant",
    ),
    Effect(
        ("algorithm.f_alpha_divergence_coef",),
        lambda config: config.options(DPOConfig).f_divergence == "alpha_divergence",
        "algorithm.f_divergence=alpha_divergence",
    ),
    Effect(
        tuple(
            f"{_LOSS}.{name}"
            for name in (
                "reference_policy_kl_type",
                "use_kl_in_reward",
                "kl_input_clamp_value",
                "kl_output_clamp_value",
            )
        ),
        compares,
        f"{_LOSS}.reference_policy_kl_penalty=0.01",
    ),
    Effect(
        (f"{_LOSS}.use_bias_correction_kl",),
        lambda config: compares(config) and not _loss(config).use_kl_in_reward,
        f"{_LOSS}.reference_policy_kl_penalty=0.01 and {_LOSS}.use_kl_in_reward=false, "
        "because in the reward the KL has no gradient",
    ),
    Effect(
        tuple(
            f"{_LOSS}.{name}" for name in ("importance_sampling_correction_level", "truncated_importance_sampling_type")
        ),
        lambda config: _loss(config).use_importance_sampling_correction,
        f"{_LOSS}.use_importance_sampling_correction=true",
    ),
)
