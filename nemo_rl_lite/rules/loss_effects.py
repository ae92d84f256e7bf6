"""Keys of GRPO's loss that have an effect only with other keys of it."""

from nemo_rl_lite.config.algorithms import compares
from nemo_rl_lite.config.schema import GRPOConfig
from nemo_rl_lite.rules.step_effects import Effect

_LOSS = "algorithm.loss_fn"


LOSS_EFFECTS = (
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
        lambda config: config.options(GRPOConfig).loss_fn.use_importance_sampling_correction,
        f"{_LOSS}.use_importance_sampling_correction=true",
    ),
)
