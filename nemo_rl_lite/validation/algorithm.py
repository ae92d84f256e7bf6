"""Rules about algorithms: losses, teacher, checkpoints, trackers."""

import netrc
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec

from nemo_rl_lite.config.algorithms import compares, has_teacher, replayed_run
from nemo_rl_lite.config.engines import engines_sleep
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import (
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    LossConfig,
)
from nemo_rl_lite.config.sizes import (
    as_teacher,
    engines_may_sleep,
    iterations,
    keeps_partial_rollouts,
    optimizer_steps,
    samples_per_step,
    validates,
)
from nemo_rl_lite.config.sources import of_source, source_configs, teacher_configs
from nemo_rl_lite.data.tasks import TASKS
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.models.shape import known_shape, push_problems
from nemo_rl_lite.system.machine import has_wandb_key
from nemo_rl_lite.validation.compose import rule
from nemo_rl_lite.validation.layout import (
    BATCH,
    check_gpu_precision,
    check_model,
    check_parallel_groups,
    check_sequence_parallel,
    check_token_batches,
)

TEACHER = "teacher.model_name"
_GROUP, _TOPK = "algorithm.num_generations_per_prompt", "algorithm.topk_logits_k"
LOSS, _ITERATIONS, _SCALE = "algorithm.loss_fn", "algorithm.num_iterations", "algorithm.normalize_rewards"
_TYPE, _RATIO = f"{LOSS}.truncated_importance_sampling_type", f"{LOSS}.truncated_importance_sampling_ratio"
# Suggested limits: of a token's weight, and of a sequence's geometric mean.
_FIRST_BOUNDS = {"icepop": (0.5, 5.0), "seq-mask-tis": (0.999, 1.002)}
# Preference losses of single responses, in which a divergence's constant terms do not cancel.
_OF_EACH_RESPONSE = ("sppo_hard", "nca_pair", "bco_pair", "apo_zero", "apo_down")
# Keys of the policy that a teacher has separately.
_OF_TEACHERS = re.compile(
    r"\bpolicy\.(?:(?:sequence_packing|dynamic_batching)\.(?=logprob_mb_tokens\b)|"
    r"(?=(?:model_name|precision|logprob_batch_size|megatron_cfg\.(?:tensor|pipeline|expert)_model_parallel_size|"
    r"megatron_cfg\.num_layers_in_(?:first|last)_pipeline_stage|megatron_cfg\.sequence_parallel|"
    r"megatron_cfg\.moe_router_dtype)\b))"
)


def corrects_staleness(loss: LossConfig) -> bool:
    """Return whether the loss weights or rejects stale tokens."""
    rejects = None not in (loss.sequence_rejection_ratio_min, loss.sequence_rejection_ratio)
    return loss.use_importance_sampling_correction or rejects


def reads_ratios(config: Config) -> bool:
    """Return whether the loss has ratios. The KL over a teacher's largest logits has none."""
    return getattr(config.algorithm, "topk_logits_k", None) is None


@rule(_GROUP, "algorithm.num_prompts_per_step", BATCH, options=GRPOConfig)
def check_rollout_size(config: Config) -> Iterator[Violation]:
    options, batch = config.options(GRPOConfig), config.policy.train_global_batch_size
    prompts, size, samples = options.num_prompts_per_step, options.num_generations_per_prompt, samples_per_step(config)
    if size < 2 and not has_teacher(config) and options.use_leave_one_out_baseline != "batch":
        yield Violation(_GROUP, size, "must be at least 2: GRPO compares a prompt's responses", f"{_GROUP}=8")
    elif samples % batch:
        near = min((one for one in range(1, samples + 1) if samples % one == 0), key=lambda one: abs(one - batch))
        rule_text = f"must divide the rollout's {samples} samples ({prompts} prompts x {size} generations)"
        yield Violation(BATCH, batch, rule_text, f"{BATCH}={near}, or another divisor of {samples}")


@rule("algorithm", "generation.max_new_tokens", options=GRPOConfig, of_sources=True)
def check_overlong_buffer(config: Config) -> Iterator[Violation]:
    most, key = config.generation.max_new_tokens, "algorithm.reward_shaping.overlong_buffer_length"
    buffer = config.options(GRPOConfig).reward_shaping.overlong_buffer_length
    if buffer is not None and buffer > most:
        yield Violation(key, buffer, f"exceeds generation.max_new_tokens = {most}", f"{key}={max(most // 4, 1)}")


@rule("algorithm", "generation.colocated", options=GRPOConfig)
def check_stale_rollouts(config: Config) -> Iterator[Violation]:
    options, key = config.options(GRPOConfig), "algorithm.rollouts.source"
    if options.rollouts.source == "on_policy":
        return
    sleeps = engines_sleep(config) or keeps_partial_rollouts(config)
    if sleeps and not engines_may_sleep(config):
        rule_text = "needs engines that stay awake during training"
        asleep = f"{key}=queue algorithm.rollouts.in_flight_weight_updates=true, whose engines may sleep"
        fix = f"generation.colocated.enabled=false, generation.colocated.sleep=false if both fit on a GPU, or {asleep}"
        yield Violation(key, options.rollouts.source, rule_text, fix)
    if options.loss is None and reads_ratios(config) and not corrects_staleness(options.loss_fn):
        rule_text = "trains on stale samples and needs importance sampling correction"
        fix = f"{LOSS}.use_importance_sampling_correction=true {_RATIO}=2"
        yield Violation(key, options.rollouts.source, rule_text, fix)


@rule("algorithm", "policy.router_replay", options=GRPOConfig)
def check_replay(config: Config) -> Iterator[Violation]:
    run = replayed_run(config)
    if run is not None and validates(config):
        off = " ".join(f"algorithm.{name}" for name in ("val_period=0", "val_at_start=false", "val_at_end=false"))
        yield Violation("algorithm.rollouts.replay", run, "has no engines, which validations need", off)
    if run is not None and config.policy.router_replay.enabled:
        key = "policy.router_replay.enabled"
        yield Violation(key, True, "saved rollouts have no routed experts", f"{key}=false: the policy's own routing")


@rule("algorithm.max_num_epochs", "algorithm.max_num_steps", "data")
def check_end(config: Config) -> Iterator[Violation]:
    options, key = config.algorithm, "algorithm.max_num_steps"
    names = {one.data.name for one in source_configs(config).values()}
    if options.max_num_steps is None and names <= {*TASKS}:
        generates = "generates" if len(names) == 1 else "generate"
        rule_text = f"is null, and {' and '.join(sorted(names))} {generates} data without end"
        yield Violation(key, None, rule_text, f"{key}=100")
    elif options.max_num_steps is None and options.max_num_epochs is None:
        fix = f"{key}=100, or algorithm.max_num_epochs=1"
        yield Violation(key, None, "is null, and algorithm.max_num_epochs too: training would never end", fix)


@rule("algorithm", "checkpoint")
def check_best_metric(config: Config) -> Iterator[Violation]:
    metric, key = config.algorithm.val_metric, "algorithm.higher_is_better"
    keeps_best = config.checkpoint.keep_best and config.checkpoint.save_period
    if not validates(config) or not (keeps_best or getattr(config.algorithm, "early_stop_patience", None)):
        return
    more = metric in ("accuracy", "pass_at_k", "rewards_margin_mean", "rewards_chosen_mean")
    # Longer and shorter responses can both be a goal.
    if metric != "avg_length" and config.algorithm.higher_is_better != more:
        rule_text = f"would keep the checkpoints with the worst {metric}"
        yield Violation(key, config.algorithm.higher_is_better, rule_text, f"{key}={str(more).lower()}")
    samples = getattr(config.algorithm, "val_samples_per_problem", None)
    if metric == "pass_at_k" and samples == 1:
        key, rule_text = "algorithm.val_metric", "needs algorithm.val_samples_per_problem > 1"
        yield Violation(key, metric, rule_text, f"algorithm.val_samples_per_problem=4, or {key}=accuracy")


@rule("algorithm.use_leave_one_out_baseline", _SCALE, options=GRPOConfig)
def check_batch_baseline_scale(config: Config) -> Iterator[Violation]:
    options, key = config.options(GRPOConfig), _SCALE
    scale = options.normalize_rewards
    if options.use_leave_one_out_baseline == "batch" and (scale is True or scale in ("mean", "parts")):
        rule_text = "divides by 0 for prompts with equal rewards, which use_leave_one_out_baseline=batch keeps"
        yield Violation(key, scale, rule_text, f"{key}=advantages, or {key}=false")


@rule("algorithm.pass_at_k", _SCALE, _GROUP, options=GRPOConfig)
def check_pass_at_k(config: Config) -> Iterator[Violation]:
    options, key = config.options(GRPOConfig), "algorithm.pass_at_k"
    k, size = options.pass_at_k, options.num_generations_per_prompt
    if k is not None and k >= size:
        rule_text = f"must be below {_GROUP} = {size}: larger subsets of the responses have equal best rewards"
        yield Violation(key, k, rule_text, f"{key}={max(size // 2, 1)}, or {_GROUP}={2 * k}")
    if k is not None and options.normalize_rewards == "parts":
        rule_text = f"takes the best of k rewards, and {_SCALE}=parts has no single reward"
        yield Violation(key, k, rule_text, f"{_SCALE}=true, or {key}=null")


@rule("algorithm", options=GRPOConfig)
def check_turn_credit(config: Config) -> Iterator[Violation]:
    options, key, ratios = config.options(GRPOConfig), "algorithm.credit", f"{LOSS}.sequence_level_importance_ratios"
    if options.credit != "turn":
        return
    if options.pass_at_k is not None:
        rule_text = "sums rewards of turns, and pass_at_k takes the best of k episodes"
        yield Violation(key, "turn", rule_text, f"algorithm.pass_at_k=null, or {key}=episode")
    if options.normalize_rewards == "parts":
        rule_text = f"sums rewards of turns, and {_SCALE}=parts normalises terms of an episode's reward"
        yield Violation(key, "turn", rule_text, f"{_SCALE}=true, or {key}=episode")
    if options.loss_fn.sequence_level_importance_ratios is True:
        rule_text = f"gives each turn its own advantage, and {ratios}=true has one ratio per sequence"
        yield Violation(key, "turn", rule_text, f"{ratios}=token, or {key}=episode")


@rule("algorithm", options=DPOConfig)
def check_preference_loss(config: Config) -> Iterator[Violation]:
    options, kind = config.options(DPOConfig), config.options(DPOConfig).preference_loss
    if not options.label_smoothing and kind == "exo_pair":
        key, rule_text = "algorithm.label_smoothing", "preference_loss=exo_pair takes its logarithm"
        yield Violation(key, options.label_smoothing, f"{rule_text}, so it must be above 0", f"{key}=1e-3")
    if options.f_divergence != "reverse_kl" and kind in _OF_EACH_RESPONSE:
        key = "algorithm.f_divergence"
        rule_text = f"preference_loss={kind} supports only the reverse KL"
        yield Violation(key, options.f_divergence, rule_text, f"{key}=reverse_kl, or algorithm.preference_loss=dpo")


@rule(BATCH, "algorithm.preference_loss", options=KTOConfig)
def check_mismatched_responses(config: Config) -> Iterator[Violation]:
    size = config.policy.train_global_batch_size
    if size < 2 and config.options(KTOConfig).preference_loss != "apo_zero_unpaired":
        rule_text = "must be at least 2: KTO estimates its KL on other responses of the batch"
        yield Violation(BATCH, size, rule_text, f"{BATCH}=64, or algorithm.preference_loss=apo_zero_unpaired")


@rule(LOSS, options=GRPOConfig)
def check_loss(config: Config) -> Iterator[Violation]:
    loss, ratios = config.options(GRPOConfig).loss_fn, f"{LOSS}.sequence_level_importance_ratios"
    if loss.sequence_level_importance_ratios is True and loss.token_level_loss is True:
        yield Violation(ratios, True, "needs token_level_loss=false or constant", f"{LOSS}.token_level_loss=false")
    if not loss.use_importance_sampling_correction:
        return
    kind, low, high = loss.truncated_importance_sampling_type, f"{_RATIO}_min", _RATIO
    level, of_sequence = f"{LOSS}.importance_sampling_correction_level", loss.correction_level == "sequence"
    least, most = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    if kind in _FIRST_BOUNDS and least is None and most is None:
        least, most = _FIRST_BOUNDS[kind]
        yield Violation(_TYPE, kind, "needs limits", f"{low}={least} {high}={most}, or {_TYPE}=tis")
    elif kind != "seq-mask-tis" and of_sequence and most is None and loss.sequence_rejection_ratio is None:
        rule_text = "is null, and a sequence's weight, a product over its tokens, needs an upper limit"
        yield Violation(high, None, rule_text, f"{high}=2, or {level}=token")
    if kind == "seq-mask-tis" and of_sequence:
        key = ratios if loss.importance_sampling_correction_level is None else level
        rule_text = f"gives one weight per sequence, and {_TYPE}=seq-mask-tis needs one per token"
        yield Violation(key, None, rule_text, f"{level}=token, or {_TYPE}=icepop")


def truncations(config: Config) -> dict[str, tuple[float | None, float | None]]:
    """Return the keys that exclude tokens from sampling, each with its value and the one that excludes none."""
    off = {"top_p": 1.0, "top_k": None, "min_p": 0.0}
    values = {f"generation.{name}": (getattr(config.generation, name), value) for name, value in off.items()}
    return {key: (value, whole) for key, (value, whole) in values.items() if value != whole}


@rule(LOSS, _TOPK, "generation.top_p", "generation.top_k", "generation.min_p", options=GRPOConfig)
def check_nucleus(config: Config) -> Iterator[Violation]:
    """Refuse top-p, top-k and min-p with sequence-level corrections. The engine's probabilities then exceed the
    policy's at every token, so the product of ratios vanishes with the length."""
    cut = truncations(config)
    if not cut or not reads_ratios(config):
        return
    key, fix = _reads_whole_sequences(config.options(GRPOConfig).loss_fn)
    if key is None:
        return
    whole = " ".join(f"{name}={'null' if value is None else value}" for name, (_, value) in cut.items())
    for name, (value, _) in cut.items():
        rule_text = f"raises the engine's probability of each token, and {key} multiplies them over a sequence"
        yield Violation(name, value, rule_text, f"{whole}, or {fix}")


def _reads_whole_sequences(loss: LossConfig) -> tuple[str | None, str]:
    """Return the key of a sequence-level correction, and how to turn it off."""
    for name in ("sequence_rejection_ratio", "sequence_rejection_ratio_min"):
        if getattr(loss, name) is not None:
            return f"{LOSS}.{name}", f"{LOSS}.{name}=null"
    if loss.use_importance_sampling_correction and loss.truncated_importance_sampling_type == "seq-mask-tis":
        return f"{_TYPE}=seq-mask-tis", f"{_TYPE}=tis"
    if loss.use_importance_sampling_correction and loss.correction_level == "sequence":
        level = f"{LOSS}.importance_sampling_correction_level"
        return f"the {level} sequence", f"{level}=token"
    return None, ""


@rule("algorithm", "policy.megatron_cfg.peft", options=GRPOConfig)
def check_moving_reference(config: Config) -> Iterator[Violation]:
    key, peft = "algorithm.ref_model_sync_steps", "policy.megatron_cfg.peft.enabled"
    steps = config.options(GRPOConfig).ref_model_sync_steps
    if steps is not None and compares(config) and config.policy.megatron_cfg.peft.enabled:
        rule_text = "needs reference weights, and with LoRA the reference is the model without its adapters"
        yield Violation(key, steps, rule_text, f"{key}=null, or {peft}=false")


@rule("algorithm", options=GRPOConfig)
def check_kl_in_reward(config: Config) -> Iterator[Violation]:
    loss, key = config.options(GRPOConfig).loss_fn, f"{LOSS}.use_kl_in_reward"
    if not (loss.use_kl_in_reward and compares(config)):
        return
    why = "gives each token its own advantage"
    if loss.sequence_level_importance_ratios is True:
        ratios = f"{LOSS}.sequence_level_importance_ratios"
        yield Violation(
            key, True, f"{why}, and {ratios}=true has one ratio per sequence", f"{ratios}=token, or {key}=false"
        )
    if loss.policy_loss in ("clip_cov", "kl_cov"):
        term = f"{LOSS}.policy_loss"
        rule_text = f"{why}, and {term}={loss.policy_loss} needs all advantages before training"
        yield Violation(key, True, rule_text, f"{term}=clip, or {key}=false")


@rule(LOSS, _GROUP, "algorithm.num_prompts_per_step", BATCH, _ITERATIONS, options=GRPOConfig)
def check_forced_ratios(config: Config) -> Iterator[Violation]:
    steps, key = optimizer_steps(config), f"{LOSS}.force_on_policy_ratio"
    if config.options(GRPOConfig).loss_fn.force_on_policy_ratio and steps > 1:
        rule_text = f"needs one optimizer step per rollout, and there are {steps}"
        once = f" {_ITERATIONS}=1" if iterations(config) > 1 else ""
        yield Violation(key, True, rule_text, f"{key}=null, or {BATCH}={samples_per_step(config)}{once}")


@rule("algorithm")
def check_own_loss(config: Config) -> Iterator[Violation]:
    if config.algorithm.loss is None:
        return
    # It imports torch, which takes seconds.
    from nemo_rl_lite.losses.interface import make_loss

    try:
        loss = make_loss(config.algorithm)
    except ConfigError as error:
        yield from error.violations
        return
    if "student_topk_logprobs" in getattr(loss, "needs", ()) and reads_ratios(config):
        rule_text = "needs student_topk_logprobs, which only a teacher with topk_logits_k gives"
        yield Violation("algorithm.loss", config.algorithm.loss, rule_text, f"algorithm=distillation {_TOPK}=64")


def with_teachers_keys(violations: Iterable[Violation]) -> list[Violation]:
    """Return violations of `as_teacher(config)` under the teacher's keys, without those of other keys."""

    def named(text: str) -> str:
        return _OF_TEACHERS.sub("teacher.", text)

    renamed = [replace(one, key=named(one.key), rule=named(one.rule), fix=named(one.fix)) for one in violations]
    return [one for one in renamed if one.key.startswith("teacher.")]


@rule("teacher", "data.sources", "cluster", "policy", "generation", options=DistillationConfig)
def check_teachers(config: Config) -> Iterator[Violation]:
    found: list[Violation] = []
    for name, one in teacher_configs(config).items():
        # Teachers have one layout, so they can have the same violation.
        found += [own for own in (of_source(name, own) for own in _of_teacher(one)) if own not in found]
    yield from found


def _of_teacher(config: Config) -> Iterator[Violation]:
    if config.teacher.model_name is None:
        rule_text = f"is null, and algorithm={config.algorithm.name} needs a teacher"
        yield Violation(TEACHER, None, rule_text, f"{TEACHER}=FOLDER, or a Hub model ID (organisation/model)")
        return
    checks = (check_model, check_parallel_groups, check_sequence_parallel, check_gpu_precision, check_token_batches)
    yield from with_teachers_keys(one for check in checks for one in check(as_teacher(config)))


@rule("data.sources", "teacher.model_name")
def check_teachers_of_sources(config: Config) -> Iterator[Violation]:
    if has_teacher(config):
        return
    for name, one in config.data.sources.items():
        if (given := one.teacher.model_name) != config.teacher.model_name:
            rule_text = f"has no effect: algorithm={config.algorithm.name} has no teacher"
            yield of_source(name, Violation(TEACHER, given, rule_text, f"algorithm=distillation, or without {TEACHER}"))


@rule(TEACHER, "data.sources", "policy.model_name", _TOPK, options=DistillationConfig)
def check_largest_logits(config: Config) -> Iterator[Violation]:
    for name, one in teacher_configs(config).items():
        yield from (of_source(name, own) for own in _largest_logits(one))


def _largest_logits(config: Config) -> Iterator[Violation]:
    topk = config.options(DistillationConfig).topk_logits_k
    teacher, policy = known_shape(config.teacher.model_name), known_shape(config.policy.model_name)
    if topk is None or teacher is None or policy is None:
        return
    if topk > teacher.vocabulary:
        yield Violation(_TOPK, topk, f"exceeds the teacher's {teacher.vocabulary} tokens", f"{_TOPK}=64")
    if teacher.vocabulary > policy.vocabulary:
        rule_text = f"has {teacher.vocabulary} tokens, more than the policy's {policy.vocabulary}"
        fix = f"{_TOPK}=null, or a teacher with the policy's vocabulary"
        yield Violation(TEACHER, config.teacher.model_name, rule_text, fix)


@rule("algorithm", options=DistillationConfig)
def check_distillation_loss(config: Config) -> Iterator[Violation]:
    options = config.options(DistillationConfig)
    coefficient, samples = options.loss_fn.reward_coef, options.num_generations_per_prompt
    if coefficient and samples < 2:
        rule_text = "must be at least 2 with reward_coef"
        yield Violation(_GROUP, samples, rule_text, f"{_GROUP}=4, or {LOSS}.reward_coef=0.0")
    if coefficient and options.topk_logits_k is not None:
        rule_text = f"has no effect with {_TOPK}"
        yield Violation(f"{LOSS}.reward_coef", coefficient, rule_text, f"{LOSS}.reward_coef=0.0, or {_TOPK}=null")
    if options.topk_logits_k is not None:
        return
    term, ratios = options.loss_fn.policy_loss, f"{LOSS}.sequence_level_importance_ratios"
    if options.loss_fn.sequence_level_importance_ratios is True and term != "reinforce":
        rule_text = "has one ratio per sequence, and a teacher gives each token its own advantage"
        yield Violation(ratios, True, rule_text, f"{ratios}=token, or {ratios}=false")
    if term in ("clip_cov", "kl_cov"):
        rule_text = "needs all advantages before training, and a teacher's follow from the training pass"
        yield Violation(f"{LOSS}.policy_loss", term, rule_text, f"{LOSS}.policy_loss=clip")


@rule("logger")
def check_trackers(config: Config) -> Iterator[Violation]:
    # Without a key W&B asks for one on a terminal, once the model is fetched.
    if config.logger.wandb_enabled and config.logger.wandb.mode == "online" and not _has_wandb_key():
        fix = "run `wandb login`, set WANDB_API_KEY, or logger.wandb.mode=offline"
        yield Violation("logger.wandb.mode", "online", "W&B has no API key on this machine", fix)
    if config.logger.mlflow_enabled and find_spec("mlflow") is None:
        install = """pip install -c "$(nrl-lite constraints)" 'nemo_rl_lite[mlflow]' (mlflow-skinny)"""
        fix = f"{install}, or logger.mlflow_enabled=false"
        yield Violation("logger.mlflow_enabled", True, "needs MLflow's client, which is not installed", fix)


@rule("checkpoint.push_to_hub")
def check_hub(config: Config) -> Iterator[Violation]:
    if (name := config.checkpoint.push_to_hub) is not None:
        yield from (Violation("checkpoint.push_to_hub", name, *problem) for problem in push_problems(name))


def _has_wandb_key() -> bool:
    # A self-hosted server may need no key.
    if os.environ.get("WANDB_BASE_URL"):
        return True
    try:
        return has_wandb_key(os.environ)
    except (OSError, netrc.NetrcParseError):
        return False
