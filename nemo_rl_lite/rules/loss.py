"""Rules about what is trained with: the options of GRPO's loss, and a loss of the user's own."""

from collections.abc import Iterator

from nemo_rl_lite.config.algorithms import compares
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import GRPOConfig, LossConfig
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


def reads_ratios(config: Config) -> bool:
    """Whether the loss weights sampled tokens by ratios, as GRPO's does; the KL over a teacher's largest logits does
    not, and holds for samples of any weights."""
    return getattr(config.algorithm, "topk_logits_k", None) is None


@rule("algorithm.loss_fn", options=GRPOConfig)
def loss_options_agree(config: Config) -> Iterator[Violation]:
    loss = config.options(GRPOConfig).loss_fn
    if loss.sequence_level_importance_ratios is True and loss.token_level_loss is True:
        key = f"{_LOSS}.sequence_level_importance_ratios"
        yield Violation(key, True, "needs a sequence-level loss", f"{_LOSS}.token_level_loss=false")
    plain_k1 = loss.reference_policy_kl_type == "k1" and not loss.use_bias_correction_kl
    if plain_k1 and loss.reference_policy_kl_penalty and not loss.use_kl_in_reward:
        key = f"{_LOSS}.use_bias_correction_kl"
        fix = f"{key}=true, or {_LOSS}.reference_policy_kl_type=k2"
        yield Violation(key, False, "leaves k1 with a gradient that averages to zero", fix)
    if loss.ratio_clip_c is not None and loss.ratio_clip_c <= 1 + loss.ratio_clip_max:
        key = f"{_LOSS}.ratio_clip_c"
        limit = 1 + loss.ratio_clip_max
        yield Violation(key, loss.ratio_clip_c, f"must exceed 1 + ratio_clip_max = {limit:g}", f"{key}=3.0")


@rule("algorithm", options=GRPOConfig)
def tokens_may_differ_in_advantage(config: Config) -> Iterator[Violation]:
    loss, key = config.options(GRPOConfig).loss_fn, f"{_LOSS}.use_kl_in_reward"
    if not (loss.use_kl_in_reward and compares(config)):
        return
    why = "gives each token of a response an advantage of its own"
    if loss.sequence_level_importance_ratios is True:
        ratios = f"{_LOSS}.sequence_level_importance_ratios"
        yield Violation(key, True, f"{why}, and {ratios}=true has one ratio for all", f"{ratios}=token, or {key}=false")
    if loss.policy_loss in ("clip_cov", "kl_cov"):
        term = f"{_LOSS}.policy_loss"
        rule_text = f"{why} after the policy is asked, and {term}={loss.policy_loss} compares advantages before that"
        yield Violation(key, True, rule_text, f"{term}=clip, or {key}=false")


def estimate_as_a_reward(config: Config) -> str | None:
    """What to say about an estimator of the KL whose value in the reward has another gradient than the KL's."""
    loss = getattr(config.algorithm, "loss_fn", None)
    if not isinstance(loss, LossConfig) or not (loss.use_kl_in_reward and compares(config)):
        return None
    kind = f"{_LOSS}.reference_policy_kl_type"
    if loss.reference_policy_kl_type == "k1":
        return None
    return (
        f"{kind} = {loss.reference_policy_kl_type}: with {_LOSS}.use_kl_in_reward it hardly holds the policy near the "
        f"reference, because as a reward only k1 has the gradient of the KL ({kind}=k1)"
    )


def steps_without_a_ratio(config: Config) -> str | None:
    """What to say about further optimizer steps on a rollout whose loss does not know that the policy has moved since.
    NeMo-RL takes them as well (`disable_ppo_ratio`); TRL's RLOO has a clipped ratio."""
    loss, steps = getattr(config.algorithm, "loss_fn", None), 1
    if isinstance(loss, LossConfig) and loss.policy_loss == "reinforce" and reads_ratios(config):
        steps = optimizer_steps(config)
    if steps == 1 or getattr(config.algorithm, "loss", None) is not None:
        return None
    return (
        f"{_LOSS}.policy_loss = reinforce: a rollout has {steps} optimizer steps, and without a ratio all but the "
        "first train on samples of older weights as if they were new "
        f"({_BATCH}={samples_per_step(config)} makes one step, {_LOSS}.policy_loss=clip has a ratio)"
    )


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


@rule("algorithm")
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
    if "student_topk_logprobs" in getattr(loss, "needs", ()) and reads_ratios(config):
        rule_text = "needs student_topk_logprobs, those of the tokens that a teacher names, and this run has no such"
        fix = "algorithm=distillation algorithm.topk_logits_k=64"
        yield Violation("algorithm.loss", config.algorithm.loss, rule_text, fix)
