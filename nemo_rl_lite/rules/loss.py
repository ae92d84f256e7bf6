"""Rules about what is trained with: the options of GRPO's loss, and a loss of the user's own."""

from collections.abc import Iterator

from nemo_rl_lite.config.schema import Config, GRPOConfig, LossConfig
from nemo_rl_lite.config.sizes import optimizer_steps, samples_per_step
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.rules.base import rule

_LOSS = "algorithm.loss_fn"
_BATCH = "policy.train_global_batch_size"
_TYPE, _RATIO = f"{_LOSS}.truncated_importance_sampling_type", f"{_LOSS}.truncated_importance_sampling_ratio"
_REJECTION, _LEVEL = f"{_LOSS}.sequence_rejection_ratio", f"{_LOSS}.importance_sampling_correction_level"
# Bounds to begin with, for the types that need some: of a token's weight, and of the geometric mean over a sequence.
_FIRST_BOUNDS = {"icepop": (0.5, 5.0), "seq-mask-tis": (0.999, 1.002)}


def corrects_age(loss: LossConfig) -> bool:
    """Whether the loss does something about tokens that older weights sampled: it weights them, or leaves out sequences
    that are too far from the policy on either side."""
    rejects = None not in (loss.sequence_rejection_ratio_min, loss.sequence_rejection_ratio)
    return loss.use_importance_sampling_correction or rejects


@rule("algorithm.loss_fn", options=GRPOConfig)
def loss_options_agree(config: Config) -> Iterator[Violation]:
    loss = config.options(GRPOConfig).loss_fn
    if loss.sequence_level_importance_ratios is True and loss.token_level_loss is True:
        key = f"{_LOSS}.sequence_level_importance_ratios"
        yield Violation(key, True, "needs a sequence-level loss", f"{_LOSS}.token_level_loss=false")
    plain_k1 = loss.reference_policy_kl_type == "k1" and not loss.use_bias_correction_kl
    if plain_k1 and loss.reference_policy_kl_penalty:
        key = f"{_LOSS}.use_bias_correction_kl"
        fix = f"{key}=true, or {_LOSS}.reference_policy_kl_type=k2"
        yield Violation(key, False, "leaves k1 with a gradient that averages to zero", fix)
    if loss.ratio_clip_c is not None and loss.ratio_clip_c <= 1 + loss.ratio_clip_max:
        key = f"{_LOSS}.ratio_clip_c"
        limit = 1 + loss.ratio_clip_max
        yield Violation(key, loss.ratio_clip_c, f"must exceed 1 + ratio_clip_max = {limit:g}", f"{key}=3.0")


@rule(_LOSS, options=GRPOConfig)
def covariances_have_a_range(config: Config) -> Iterator[Violation]:
    loss = config.options(GRPOConfig).loss_fn
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        key, rule_text = f"{_LOSS}.clip_cov_lb", f"must be smaller than clip_cov_ub = {loss.clip_cov_ub:g}"
        yield Violation(key, loss.clip_cov_lb, rule_text, f"{key}=1.0 {_LOSS}.clip_cov_ub=5.0")


@rule(f"{_LOSS}.force_on_policy_ratio", _BATCH, options=GRPOConfig)
def forced_ratios_are_true(config: Config) -> Iterator[Violation]:
    steps = optimizer_steps(config)
    if config.options(GRPOConfig).loss_fn.force_on_policy_ratio and steps > 1:
        key, samples = f"{_LOSS}.force_on_policy_ratio", samples_per_step(config)
        rule_text = f"a rollout has {steps} optimizer steps, and ratios are 1 in the first one alone"
        yield Violation(key, True, rule_text, f"{key}=null, or {_BATCH}={samples}")


@rule("algorithm.loss_fn", options=GRPOConfig)
def bounds_bound_something(config: Config) -> Iterator[Violation]:
    loss = config.options(GRPOConfig).loss_fn
    low, high = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    kind = loss.truncated_importance_sampling_type
    if loss.use_importance_sampling_correction:
        if kind in _FIRST_BOUNDS and low is None and high is None:
            least, most = _FIRST_BOUNDS[kind]
            yield Violation(_TYPE, kind, "needs bounds", f"{_RATIO}_min={least} {_RATIO}={most}, or {_TYPE}=tis")
    else:
        for key, value in ((f"{_RATIO}_min", low), (_RATIO, high)):
            if value is not None:
                fix = f"{_LOSS}.use_importance_sampling_correction=true, or {key}=null"
                yield Violation(key, value, "limits a correction that is off", fix)
    for key, least, most in (
        (_RATIO, low, high),
        (_REJECTION, loss.sequence_rejection_ratio_min, loss.sequence_rejection_ratio),
    ):
        if least is not None and least == most:
            yield Violation(f"{key}_min", least, f"must be smaller than {key} = {most:g}", f"{key}_min=0.5")


@rule("algorithm.loss_fn", options=GRPOConfig)
def masked_sequences_have_a_weight_for_each_token(config: Config) -> Iterator[Violation]:
    loss = config.options(GRPOConfig).loss_fn
    if loss.truncated_importance_sampling_type != "seq-mask-tis" or not loss.use_importance_sampling_correction:
        return
    if loss.correction_level == "sequence":
        ratios = f"{_LOSS}.sequence_level_importance_ratios"
        own = ratios, loss.sequence_level_importance_ratios
        key, value = own if loss.importance_sampling_correction_level is None else (_LEVEL, "sequence")
        rule_text = f"makes one weight for a sequence, and {_TYPE}=seq-mask-tis has one for each token"
        yield Violation(key, value, rule_text, f"{_LEVEL}=token, or {_TYPE}=icepop")
    for key, bound in (
        (f"{_REJECTION}_min", loss.sequence_rejection_ratio_min),
        (_REJECTION, loss.sequence_rejection_ratio),
    ):
        if bound is not None:
            rule_text = f"bounds the same geometric mean as {_RATIO} with {_TYPE}=seq-mask-tis"
            yield Violation(key, bound, rule_text, f"{key}=null, or {_TYPE}=tis")


@rule("algorithm", "policy.megatron_cfg.tensor_model_parallel_size")
def own_loss_can_be_made(config: Config) -> Iterator[Violation]:
    if config.algorithm.loss is None:
        if config.algorithm.loss_kwargs:
            rule_text, fix = "belong to algorithm.loss, which is null", "algorithm.loss=package.module.Class"
            yield Violation("algorithm.loss_kwargs", config.algorithm.loss_kwargs, rule_text, fix)
        return
    # The import takes seconds, because a loss imports torch: only where there is one.
    from nemo_rl_lite.losses.registry import make_loss

    try:
        loss = make_loss(config.algorithm)
    except ConfigError as error:
        yield from error.violations
        return
    tensor = config.policy.megatron_cfg.tensor_model_parallel_size
    if "topk_logits" in getattr(loss, "needs", ()) and tensor > 1:
        key = "policy.megatron_cfg.tensor_model_parallel_size"
        rule_text = f"splits the vocabulary, and {config.algorithm.loss} needs topk_logits, which take all of it"
        yield Violation(key, tensor, rule_text, f"{key}=1")
