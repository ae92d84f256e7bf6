"""Keys of GRPO's and DPO's loss that have an effect only with other keys of it."""

from nemo_rl_lite.config.algorithms import compares
from nemo_rl_lite.config.schema import Config, DPOConfig, GRPOConfig, LossConfig
from nemo_rl_lite.rules.step_effects import Effect

_LOSS = "algorithm.loss_fn"


def _loss(config: Config) -> LossConfig:
    return config.options(GRPOConfig).loss_fn


LOSS_EFFECTS = (
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
                "use_bias_correction_kl",
                "kl_input_clamp_value",
                "kl_output_clamp_value",
            )
        ),
        compares,
        f"{_LOSS}.reference_policy_kl_penalty=0.01",
    ),
    Effect(
        tuple(
            f"{_LOSS}.{name}" for name in ("importance_sampling_correction_level", "truncated_importance_sampling_type")
        ),
        lambda config: _loss(config).use_importance_sampling_correction,
        f"{_LOSS}.use_importance_sampling_correction=true",
    ),
)
