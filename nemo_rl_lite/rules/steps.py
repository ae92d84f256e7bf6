"""Checks and notes about a run's steps, where the data says how many there are."""

import dataclasses
import logging
from collections.abc import Iterator

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import GRPOConfig, RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import samples_per_step
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.rules.layout import MEGATRON

log = logging.getLogger(__name__)


def note_total_steps(config: Config, total: int) -> None:
    """Warn of a schedule that does not fit a run that ends after `total` steps, by its epochs."""
    if total != config.algorithm.max_num_steps:
        options = dataclasses.replace(config.algorithm, max_num_steps=total)
        for note in schedule_notes(dataclasses.replace(config, algorithm=options)):
            log.warning(note)


def check_epochs(config: Config, prompts: int) -> None:
    """Warn where a step samples a prompt twice. `prompts`: those of an epoch; 0 where the data has no end.

    Raises:
        ConfigError: prompts that have no epochs cannot rest.
    """
    options = config.options(GRPOConfig)
    key, a_step = "algorithm.rest_epochs", options.num_prompts_per_step
    if options.rest_epochs and not prompts:
        rule, fix = "needs data with epochs, and this data has no end", f"{key}=0, or data=file"
        raise ConfigError([Violation(key, options.rest_epochs, rule, fix)])
    if 0 < prompts < a_step:
        rule = "the data has %d prompts, so that a step samples some of them twice"
        log.warning(f"algorithm.num_prompts_per_step = %d: {rule}", a_step, prompts)


def schedule_notes(config: Config) -> Iterator[str]:
    """Yield that the learning rate never reaches its maximum, or its minimum, as far as the steps are known."""
    steps, scheduler = config.algorithm.max_num_steps, config.policy.megatron_cfg.scheduler
    if steps is None:
        return
    if isinstance(config.algorithm, RolloutAlgorithmConfig):
        steps *= max(1, samples_per_step(config) // config.policy.train_global_batch_size)
    if scheduler.lr_warmup_iters >= max(steps, 1):
        key, rule = f"{MEGATRON}.scheduler.lr_warmup_iters", "so the learning rate never reaches optimizer.lr"
        yield f"{key} = {scheduler.lr_warmup_iters}: the run has {steps} optimizer steps, {rule}"
    if scheduler.lr_decay_style != "constant" and 2 * steps <= scheduler.lr_decay_iters:
        key, rule = f"{MEGATRON}.scheduler.lr_decay_iters", "so the learning rate does not come near optimizer.min_lr"
        yield f"{key} = {scheduler.lr_decay_iters}: the run has {steps} optimizer steps, {rule}"
