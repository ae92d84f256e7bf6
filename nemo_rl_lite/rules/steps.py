"""The rules about a run's steps, asked again where the data says how many there are."""

import dataclasses
import logging
from collections.abc import Iterator

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import GRPOConfig, RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import samples_per_step
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.rules.algorithm import patience_has_validations
from nemo_rl_lite.rules.layout import MEGATRON
from nemo_rl_lite.rules.profile import profiled_steps_are_taken

log = logging.getLogger(__name__)


def check_total_steps(config: Config, total: int) -> None:
    """Raise ConfigError where a run that ends after `total` steps, by its epochs, cannot do what its keys say."""
    options = dataclasses.replace(config.algorithm, max_num_steps=total)
    whole = dataclasses.replace(config, algorithm=options)
    if violations := [*profiled_steps_are_taken(whole), *patience_has_validations(whole)]:
        raise ConfigError(violations)
    if total != config.algorithm.max_num_steps:
        for told in filter(None, (endless_warm_up(whole), *unfinished_decay(whole))):
            log.warning(told)


def check_epochs(config: Config, prompts: int) -> None:
    """Warn where a step samples a prompt twice, or no prompt comes back in the run and so none could rest. `prompts`:
    those of an epoch; 0 where the data has no end.

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
    most = options.max_num_steps * a_step
    most *= options.dynamic_sampling_max_gen_batches if options.use_dynamic_sampling else 1
    if options.rest_epochs and most <= prompts:
        rule = "no prompt comes back in this run, so that none could rest: an epoch has %d prompts"
        log.warning(f"{key} = %d: {rule}", options.rest_epochs, prompts)


def endless_warm_up(config: Config) -> str:
    """That the warm-up is as long as the run, as far as that is known; empty where it is not. A short run of a recipe
    has one, too, and may be what is wanted."""
    steps, warm_up = _optimizer_steps(config), config.policy.megatron_cfg.scheduler.lr_warmup_iters
    if steps is None or not warm_up or warm_up < steps:
        return ""
    key = f"{MEGATRON}.scheduler.lr_warmup_iters"
    return f"{key} = {warm_up}: the run has {steps} optimizer steps, so the learning rate never reaches optimizer.lr"


def unfinished_decay(config: Config) -> Iterator[str]:
    """Yield that the learning rate has hardly decayed at the end of the run, as far as that is known."""
    steps, scheduler = _optimizer_steps(config), config.policy.megatron_cfg.scheduler
    if scheduler.lr_decay_style != "constant" and steps is not None and 2 * steps <= scheduler.lr_decay_iters:
        key = f"{MEGATRON}.scheduler.lr_decay_iters"
        rule = f"the run has {steps} optimizer steps, so the learning rate does not come near optimizer.min_lr"
        yield f"{key} = {scheduler.lr_decay_iters}: {rule}"


def _optimizer_steps(config: Config) -> int | None:
    """The optimizer steps of the run; None where the data decides."""
    steps = config.algorithm.max_num_steps
    if steps is not None and isinstance(config.algorithm, RolloutAlgorithmConfig):
        steps *= max(1, samples_per_step(config) // config.policy.train_global_batch_size)
    return steps
