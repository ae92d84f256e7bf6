"""Rules about the teacher of a distillation: those of a policy, asked of the teacher, and those of both together."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import DistillationConfig
from nemo_rl_lite.config.teacher import as_teacher
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.models.shape import ModelShape, NoModelError, read_model_shape
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.batches import token_batches_hold_a_sequence
from nemo_rl_lite.rules.layout import PARALLEL, gpu_only_layouts, gpus_compute_in_bfloat16, ranks_fill_parallel_groups
from nemo_rl_lite.rules.model import model_fits_the_layout

KEY = "teacher.model_name"
_TOPK, _LOSS = "algorithm.topk_logits_k", "algorithm.loss_fn"
# The keys of a policy that a teacher has of its own, as far as these rules name them.
_OWN = re.compile(
    r"\bpolicy\.(?=(model_name|precision|logprob_batch_size|megatron_cfg\.(tensor|pipeline|expert)_model_parallel_size|"
    r"megatron_cfg\.num_layers_in_(first|last)_pipeline_stage|megatron_cfg\.sequence_parallel|"
    r"megatron_cfg\.moe_router_dtype)\b)"
)
_LIMITS = re.compile(r"\bpolicy\.(sequence_packing|dynamic_batching)\.(?=logprob_mb_tokens\b)")
_OF_A_POLICY: tuple[Callable[[Config], Iterator[Violation]], ...] = (
    model_fits_the_layout,
    ranks_fill_parallel_groups,
    gpu_only_layouts,
    gpus_compute_in_bfloat16,
    token_batches_hold_a_sequence,
)


def with_teachers_keys(violations: Iterable[Violation]) -> list[Violation]:
    """The violations of a policy that is a teacher, under the teacher's keys; those of keys that are not the teacher's
    are left out, because they are the policy's own."""

    def named(text: str) -> str:
        return _LIMITS.sub("teacher.", _OWN.sub("teacher.", text))

    renamed = [replace(one, key=named(one.key), rule=named(one.rule), fix=named(one.fix)) for one in violations]
    return [one for one in renamed if one.key.startswith("teacher.")]


@rule(KEY, options=DistillationConfig)
def there_is_a_teacher(config: Config) -> Iterator[Violation]:
    if config.teacher.model_name is None:
        rule_text = f"is null, and algorithm={config.algorithm.name} learns from a teacher"
        yield Violation(KEY, None, rule_text, f"{KEY}=FOLDER, or a hub name (organisation/model)")


@rule(
    *PARALLEL,
    "teacher",
    "policy",
    "generation.backend",
    "generation.vllm_cfg.tensor_parallel_size",
    "generation.stop_token_ids",
    options=DistillationConfig,
)
def teacher_fits_the_layout(config: Config) -> Iterator[Violation]:
    if config.teacher.model_name is not None:
        own = as_teacher(config)
        yield from with_teachers_keys(one for check in _OF_A_POLICY for one in check(own))


@rule(KEY, "policy.model_name", _TOPK, options=DistillationConfig)
def largest_logits_are_of_the_policys_tokens(config: Config) -> Iterator[Violation]:
    topk = config.options(DistillationConfig).topk_logits_k
    teacher, policy = _shape(config.teacher.model_name), _shape(config.policy.model_name)
    if topk is None or teacher is None or policy is None:
        return
    if topk > teacher.vocabulary:
        yield Violation(_TOPK, topk, f"exceeds the teacher's {teacher.vocabulary} tokens", f"{_TOPK}=64")
    if teacher.vocabulary > policy.vocabulary:
        rule_text = f"has {teacher.vocabulary} tokens, and policy.model_name {policy.vocabulary}: it may name one that "
        rule_text += "the policy does not have"
        fix = f"{_TOPK}=null, or a teacher with as many tokens"
        yield Violation(KEY, config.teacher.model_name, rule_text, fix)


@rule("algorithm", options=DistillationConfig)
def what_teaches_is_read(config: Config) -> Iterator[Violation]:
    options = config.options(DistillationConfig)
    coefficient, samples = options.loss_fn.reward_coef, options.num_generations_per_prompt
    if coefficient and samples < 2:
        key, rule_text = "algorithm.num_generations_per_prompt", "the reward compares samples of one prompt"
        yield Violation(key, samples, f"{rule_text}, so it needs at least 2", f"{key}=4, or {_LOSS}.reward_coef=0.0")
    if coefficient and options.topk_logits_k is not None:
        rule_text = "belongs to the loss on sampled tokens, and algorithm.topk_logits_k is set"
        fix = f"{_LOSS}.reward_coef=0.0, or {_TOPK}=null"
        yield Violation(f"{_LOSS}.reward_coef", coefficient, rule_text, fix)
    for key, value, off in (
        ("algorithm.use_dynamic_sampling", options.use_dynamic_sampling, "false"),
        ("algorithm.rest_epochs", options.rest_epochs, "0"),
    ):
        if value and not coefficient:
            rule_text = "leaves out prompts whose rewards are all equal, which the teacher teaches as well"
            yield Violation(key, value, rule_text, f"{key}={off}, or {_LOSS}.reward_coef=1.0")


@rule(f"{_LOSS}.policy_loss", _TOPK, options=DistillationConfig)
def covariances_are_of_advantages_that_are_known(config: Config) -> Iterator[Violation]:
    key, term = f"{_LOSS}.policy_loss", config.options(DistillationConfig).loss_fn.policy_loss
    if term in ("clip_cov", "kl_cov") and config.options(DistillationConfig).topk_logits_k is None:
        rule_text = "compares advantages that a step has before a policy is asked, and a teacher's are of its logprobs"
        yield Violation(key, term, rule_text, f"{key}=clip")


def _shape(name: str | None) -> ModelShape | None:
    """Return None also if the model is unusable, which another rule reports."""
    try:
        return None if name is None else read_model_shape(name)
    except (NoModelError, OSError, UnicodeDecodeError, RuntimeError):
        return None
