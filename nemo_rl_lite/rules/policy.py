"""Rules about the chat template, and about the optimizer and its schedule."""

from collections.abc import Iterator
from pathlib import Path

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule

TEMPLATE = "policy.tokenizer.chat_template"
DATA_PARALLEL = "policy.megatron_cfg.distributed_data_parallel_config"


@rule(TEMPLATE)
def chat_template_can_be_read(config: Config) -> Iterator[Violation]:
    template = config.policy.tokenizer.chat_template
    if template is None:
        return
    from jinja2 import TemplateSyntaxError

    from nemo_rl_lite.compat.transformers import check_template

    try:
        check_template(Path(template).expanduser().read_text())
    except (OSError, RuntimeError, ValueError) as error:
        fix = "the path of a file with a Jinja template"
        yield Violation(TEMPLATE, template, f"cannot be read: {getattr(error, 'strerror', None) or error}", fix)
    except TemplateSyntaxError as error:
        yield Violation(
            TEMPLATE, template, f"the template is broken: line {error.lineno}: {error.message}", "correct it"
        )


@rule("policy.megatron_cfg.optimizer.optimizer", "policy.megatron_cfg.optimizer.use_distributed_optimizer")
def optimizer_can_be_sharded(config: Config) -> Iterator[Violation]:
    optimizer = config.policy.megatron_cfg.optimizer
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        key = "policy.megatron_cfg.optimizer.use_distributed_optimizer"
        yield Violation(key, True, "megatron-core shards the states of adam only, not of sgd", f"{key}=false")


@rule(DATA_PARALLEL, "policy.megatron_cfg.optimizer.use_distributed_optimizer")
def gathered_weights_are_sharded(config: Config) -> Iterator[Violation]:
    parallel, key = config.policy.megatron_cfg, f"{DATA_PARALLEL}.overlap_param_gather"
    if not parallel.distributed_data_parallel_config.overlap_param_gather:
        return
    if not parallel.optimizer.use_distributed_optimizer:
        sharded = "policy.megatron_cfg.optimizer.use_distributed_optimizer"
        rule_text = (
            "gathers what a sharded optimizer leaves with one replica each, and use_distributed_optimizer is off"
        )
        yield Violation(key, True, rule_text, f"{key}=false, or {sharded}=true")
    if not parallel.distributed_data_parallel_config.overlap_grad_reduce:
        gradients = f"{DATA_PARALLEL}.overlap_grad_reduce"
        rule_text = (
            "gathers in the buckets in which gradients are reduced, and without overlap_grad_reduce there is one"
        )
        yield Violation(key, True, rule_text, f"{gradients}=true, or {key}=false")


@rule("policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler")
def learning_rates_are_ordered(config: Config) -> Iterator[Violation]:
    optimizer, scheduler = config.policy.megatron_cfg.optimizer, config.policy.megatron_cfg.scheduler
    prefix, decays = "policy.megatron_cfg", scheduler.lr_decay_style != "constant"
    if optimizer.min_lr > optimizer.lr:
        key = f"{prefix}.optimizer.min_lr"
        yield Violation(key, optimizer.min_lr, f"must not exceed lr = {optimizer.lr:g}", f"{key}=0.0")
    if decays and optimizer.min_lr == optimizer.lr:
        key = f"{prefix}.optimizer.min_lr"
        rule_text = f"is lr too, so {prefix}.scheduler.lr_decay_style={scheduler.lr_decay_style} would change nothing"
        yield Violation(key, optimizer.min_lr, rule_text, f"{key}=0.0, or {prefix}.scheduler.lr_decay_style=constant")
    if scheduler.lr_warmup_iters and scheduler.lr_warmup_init > optimizer.lr:
        key = f"{prefix}.scheduler.lr_warmup_init"
        yield Violation(key, scheduler.lr_warmup_init, f"must not exceed lr = {optimizer.lr:g}", f"{key}=0.0")
    if decays and scheduler.lr_warmup_iters >= scheduler.lr_decay_iters:
        key = f"{prefix}.scheduler.lr_warmup_iters"
        rule_text = f"must be smaller than lr_decay_iters = {scheduler.lr_decay_iters}"
        yield Violation(key, scheduler.lr_warmup_iters, rule_text, f"{key}=0")
