"""Rules about the options of algorithms and the data that they train on."""

from collections.abc import Iterator

from nemo_rl_lite.config.algorithms import has_teacher
from nemo_rl_lite.config.engines import engines_sleep
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import DPOConfig, GRPOConfig, KTOConfig, SupervisedConfig
from nemo_rl_lite.data.formats import CHATS, NEEDS_NEGATIVES, PROBLEMS, UNPAIRED, kind_of
from nemo_rl_lite.data.sources import TASKS
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.loss import corrects_age, reads_ratios

# The preference losses that take label_smoothing; and those of each response for itself, as TRL has them.
_SMOOTHED = ("dpo", "robust", "exo_pair")
_OF_EACH_RESPONSE = ("sppo_hard", "nca_pair", "bco_pair", "apo_zero", "apo_down")


@rule("algorithm.num_generations_per_prompt", options=GRPOConfig)
def groups_have_a_baseline(config: Config) -> Iterator[Violation]:
    size = config.options(GRPOConfig).num_generations_per_prompt
    if size < 2 and not has_teacher(config):
        key = "algorithm.num_generations_per_prompt"
        yield Violation(key, size, "GRPO compares samples of one prompt, so it needs at least 2", f"{key}=8")


@rule("algorithm", "generation.max_new_tokens", options=GRPOConfig)
def lengths_and_tries_can_be_met(config: Config) -> Iterator[Violation]:
    options, most = config.options(GRPOConfig), config.generation.max_new_tokens
    buffer = options.reward_shaping.overlong_buffer_length
    if buffer is not None and buffer > most:
        key, rule_text = (
            "algorithm.reward_shaping.overlong_buffer_length",
            f"exceeds generation.max_new_tokens = {most}",
        )
        yield Violation(key, buffer, rule_text, f"{key}={max(most // 4, 1)}, or another number up to {most}")
    batches = options.dynamic_sampling_max_gen_batches
    prompts, key = options.num_prompts_per_step, "algorithm.dynamic_sampling_max_gen_batches"
    if options.use_dynamic_sampling and int(prompts * batches) <= prompts:
        rule_text = f"lets a step sample {int(prompts * batches)} prompts in all, and so replace none of its {prompts}"
        yield Violation(key, batches, rule_text, f"{key}=3, or algorithm.use_dynamic_sampling=false")
    elif options.use_dynamic_sampling and options.oversample != "auto" and options.oversample > batches:
        key = "algorithm.oversample"
        rule_text = f"exceeds algorithm.dynamic_sampling_max_gen_batches = {batches:g}, what a step may sample in all"
        yield Violation(key, options.oversample, rule_text, f"{key}={batches:g} or less, or {key}=auto")


@rule("algorithm.rollouts", "algorithm.loss_fn", "algorithm.loss", "generation.colocated", options=GRPOConfig)
def older_rollouts_are_corrected(config: Config) -> Iterator[Violation]:
    options = config.options(GRPOConfig)
    key, source = "algorithm.rollouts.source", options.rollouts.source
    if source == "on_policy":
        return
    if engines_sleep(config):
        rule_text = "generates while the policy trains, when engines on the policy's GPUs sleep"
        fix = "generation.colocated.enabled=false, or generation.colocated.sleep=false where both fit on a GPU"
        yield Violation(key, source, rule_text, fix)
    if options.loss is None and reads_ratios(config) and not corrects_age(options.loss_fn):
        rule_text = "trains on what older weights sampled, which the loss must correct"
        fix = (
            "algorithm.loss_fn.use_importance_sampling_correction=true "
            "algorithm.loss_fn.truncated_importance_sampling_ratio=2"
        )
        yield Violation(key, source, rule_text, fix)


@rule("algorithm.max_num_epochs", "algorithm.max_num_steps", "data.name", options=SupervisedConfig)
def training_ends(config: Config) -> Iterator[Violation]:
    options = config.options(SupervisedConfig)
    key, endless = "algorithm.max_num_steps", config.data.name in TASKS
    if options.max_num_steps is None and endless:
        yield Violation(key, None, f"is null, and the data of {config.data.name} never ends", f"{key}=100")
    elif options.max_num_steps is None and options.max_num_epochs is None:
        fix = f"{key}=100, or algorithm.max_num_epochs=1"
        yield Violation(key, None, "is null, and so is algorithm.max_num_epochs: training would not end", fix)


@rule("algorithm.val_metric", "algorithm.higher_is_better")
def better_is_what_the_metric_means(config: Config) -> Iterator[Violation]:
    metric, key = config.algorithm.val_metric, "algorithm.higher_is_better"
    more = metric in ("accuracy", "pass_at_k", "rewards_margin_mean", "rewards_chosen_mean")
    # Longer and shorter responses can both be a goal.
    if metric != "avg_length" and config.algorithm.higher_is_better != more:
        rule_text = f"would keep the checkpoints with the worst {metric}"
        yield Violation(key, config.algorithm.higher_is_better, rule_text, f"{key}={str(more).lower()}")


@rule("algorithm.val_metric", "algorithm.val_samples_per_problem", options=GRPOConfig)
def several_samples_measure_pass_at_k(config: Config) -> Iterator[Violation]:
    options, key = config.options(GRPOConfig), "algorithm.val_metric"
    if options.val_metric == "pass_at_k" and options.val_samples_per_problem == 1:
        rule_text = "is measured with several responses to a problem, and algorithm.val_samples_per_problem is 1"
        yield Violation(key, "pass_at_k", rule_text, f"algorithm.val_samples_per_problem=4, or {key}=accuracy")


@rule("data.name")
def tasks_know_mistakes(config: Config) -> Iterator[Violation]:
    kind = kind_of(config)
    if config.data.name == "reasoning_gym" and kind in NEEDS_NEGATIVES:
        rule_text = f"has right answers only, and {kind.name} need wrong ones as well"
        yield Violation("data.name", config.data.name, rule_text, f"data=file or data=hub, with {kind.name}")


@rule("data.too_long")
def prompts_are_not_cut(config: Config) -> Iterator[Violation]:
    if config.data.too_long == "truncate" and kind_of(config) is PROBLEMS:
        fix = "data.too_long=drop, or a larger policy.max_total_sequence_length"
        yield Violation("data.too_long", "truncate", "would cut off a prompt's end, which is what it asks", fix)


@rule("data")
def chats_are_in_rows(config: Config) -> Iterator[Violation]:
    data, key = config.data, "data.messages_column"
    if kind_of(config) is not CHATS:
        return
    if data.name in TASKS and data.messages_column is not None:
        yield Violation(key, data.messages_column, f"{data.name} has no such columns", f"{key}=null")
    if data.messages_column is None:
        if data.tools_column is not None:
            rule_text = "belongs to chats, and data.messages_column is null"
            yield Violation("data.tools_column", data.tools_column, rule_text, f"{key}=messages")
        return
    for other in ("response_column", "prompt_template"):
        if getattr(data, other) is not None:
            rule_text = "prompts and responses are in the messages already"
            yield Violation(f"data.{other}", getattr(data, other), rule_text, f"data.{other}=null, or {key}=null")


@rule("data")
def columns_are_read(config: Config) -> Iterator[Violation]:
    kind = kind_of(config)
    for name in kind.unread:
        if (value := getattr(config.data, name)) is not None:
            rule_text = f"is not read with algorithm={config.algorithm.name}, which trains on {kind.name}"
            yield Violation(f"data.{name}", value, rule_text, f"data.{name}=null, or algorithm=sft")


@rule("algorithm.early_stop_patience", "algorithm.val_period", options=SupervisedConfig)
def patience_has_validations(config: Config) -> Iterator[Violation]:
    options, key = config.options(SupervisedConfig), "algorithm.early_stop_patience"
    if options.early_stop_patience is not None and not options.val_period:
        rule_text = "counts validations, and algorithm.val_period = 0"
        yield Violation(key, options.early_stop_patience, rule_text, f"algorithm.val_period=10, or {key}=null")
    elif options.early_stop_patience and options.max_num_steps and options.val_period:
        most = options.max_num_steps // options.val_period + options.val_at_start + options.val_at_end
        if options.early_stop_patience >= most:
            rule_text = f"counts validations, and {options.max_num_steps} steps have {most}"
            fix = f"{key}=null, or a smaller algorithm.val_period"
            yield Violation(key, options.early_stop_patience, rule_text, fix)


@rule("algorithm.preference_loss", "algorithm.label_smoothing", options=DPOConfig)
def smoothing_is_of_the_sigmoid(config: Config) -> Iterator[Violation]:
    options, key = config.options(DPOConfig), "algorithm.label_smoothing"
    kind, smoothing = options.preference_loss, options.label_smoothing
    if smoothing and kind not in _SMOOTHED:
        yield Violation(key, smoothing, f"preference_loss={kind} has no such term", f"{key}=0.0")
    if not smoothing and kind == "exo_pair":
        rule_text = "preference_loss=exo_pair takes its logarithm, which must be above 0"
        yield Violation(key, smoothing, rule_text, f"{key}=1e-3")


@rule("policy.train_global_batch_size", "algorithm.preference_loss", options=KTOConfig)
def a_batch_has_mismatched_responses(config: Config) -> Iterator[Violation]:
    key, size = "policy.train_global_batch_size", config.policy.train_global_batch_size
    if size < 2 and config.options(KTOConfig).preference_loss != "apo_zero_unpaired":
        rule_text = "leaves no other response of the batch, by which KTO estimates its KL"
        yield Violation(key, size, rule_text, f"{key}=64, or algorithm.preference_loss=apo_zero_unpaired")


@rule("algorithm.preference_loss", "algorithm.f_divergence", options=DPOConfig)
def divergences_are_of_a_difference(config: Config) -> Iterator[Violation]:
    options, key = config.options(DPOConfig), "algorithm.f_divergence"
    if options.f_divergence != "reverse_kl" and options.preference_loss in _OF_EACH_RESPONSE:
        rule_text = f"preference_loss={options.preference_loss} compares no difference of responses, but each of them"
        yield Violation(key, options.f_divergence, rule_text, f"{key}=reverse_kl, or algorithm.preference_loss=dpo")


@rule("algorithm.use_leave_one_out_baseline", "algorithm.normalize_rewards", options=GRPOConfig)
def a_baseline_of_the_step_has_its_scale(config: Config) -> Iterator[Violation]:
    options, key = config.options(GRPOConfig), "algorithm.normalize_rewards"
    scale = options.normalize_rewards
    if options.use_leave_one_out_baseline == "batch" and (scale is True or scale == "parts"):
        rule_text = "divides by 0 where a prompt's rewards are all equal, which teach with this baseline"
        yield Violation(key, scale, rule_text, f"{key}=advantages, or {key}=false")


@rule("algorithm.normalize_rewards", "reward", options=GRPOConfig)
def parts_are_several(config: Config) -> Iterator[Violation]:
    key = "algorithm.normalize_rewards"
    if config.options(GRPOConfig).normalize_rewards == "parts" and not config.reward.terms:
        rule_text = "needs a reward of several terms, and there is one"
        yield Violation(key, "parts", rule_text, f"{key}=true, or reward.terms")


@rule("algorithm", options=GRPOConfig)
def dynamic_sampling_knows_what_teaches(config: Config) -> Iterator[Violation]:
    options = config.options(GRPOConfig)
    if options.use_leave_one_out_baseline != "batch":
        return
    for key, value, off in (
        ("algorithm.use_dynamic_sampling", options.use_dynamic_sampling, "false"),
        ("algorithm.rest_epochs", options.rest_epochs, "0"),
    ):
        if value:
            rule_text = "leaves out prompts whose rewards are all equal, which teach with a baseline of the whole batch"
            yield Violation(key, value, rule_text, f"{key}={off}, or algorithm.use_leave_one_out_baseline=false")


@rule("data.name", "data.response_column")
def responses_are_in_rows(config: Config) -> Iterator[Violation]:
    data = config.data
    if kind_of(config) in (CHATS, UNPAIRED) and data.name in TASKS and data.response_column is not None:
        key, rule_text = "data.response_column", f"{data.name} has no such columns; its answers are the responses"
        yield Violation(key, data.response_column, rule_text, f"{key}=null")
