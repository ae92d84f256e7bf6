"""Rules about the optimizer and its schedule."""

from collections.abc import Iterator

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule


@rule("policy.megatron_cfg.optimizer.optimizer", "policy.megatron_cfg.optimizer.use_distributed_optimizer")
def optimizer_can_be_sharded(config: Config) -> Iterator[Violation]:
    optimizer = config.policy.megatron_cfg.optimizer
    if optimizer.optimizer == "sgd" and optimizer.use_distributed_optimizer:
        key = "policy.megatron_cfg.optimizer.use_distributed_optimizer"
        yield Violation(key, True, "megatron-core shards the states of adam only, not of sgd", f"{key}=false")


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
