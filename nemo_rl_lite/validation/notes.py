"""Notes: what a command is told without being refused, because it may be meant."""

import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nemo_rl_lite.config.active import idle_note
from nemo_rl_lite.config.algorithms import compares
from nemo_rl_lite.config.keys import known_variables, unread_variables
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import LossConfig, RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import optimizer_steps, samples_per_step, validates
from nemo_rl_lite.validation.algorithm import LOSS, reads_ratios
from nemo_rl_lite.validation.layout import BATCH, MEGATRON

log = logging.getLogger(__name__)


def notes(config: Config, given: Sequence[str]) -> Iterator[str]:
    """Yield the notes on a command with the keys `given`."""
    if unread := unread_variables():
        known = ", ".join(sorted(known_variables()))
        yield f"without effect, because nothing reads it: {', '.join(unread)} (read are {known})"
    if idle := idle_note(config, given):
        yield idle
    if any(key.startswith(f"{MEGATRON}.scheduler.") for key in given):
        yield from _schedule_notes(config)
    if config.data.validation_fraction and not validates(config):
        key = f"data.validation_fraction = {config.data.validation_fraction:g}"
        yield f"{key}: these rows are withheld from training, and this run does not validate"
    if isinstance(loss := getattr(config.algorithm, "loss_fn", None), LossConfig):
        yield from filter(None, (_kl_estimate(config, loss), _steps_without_a_ratio(config, loss)))
        yield from _adapter_dropout(config)
    yield from _unread_environment(config)


def notes_elsewhere(config: Config) -> Iterator[str]:
    """Yield notes of a command that plans or submits a run for another machine; here the run would be refused."""
    named = config.checkpoint.resume_from
    if named is not None and not Path(named).expanduser().is_dir():
        yield f"checkpoint.resume_from = {named}: there is no such folder here"


def show_notes(found: Iterable[str]) -> None:
    """Print notes."""
    for note in found:
        sys.stderr.write(f"note: {note}\n")


def _unread_environment(config: Config) -> Iterator[str]:
    """Yield the environment variables of trackers that keys override."""
    logger = config.logger
    keys = {
        "MLFLOW_TRACKING_URI": ("mlflow.tracking_uri", logger.mlflow.tracking_uri, logger.mlflow_enabled),
        "MLFLOW_EXPERIMENT_NAME": ("mlflow.experiment", logger.mlflow.experiment, logger.mlflow_enabled),
        "WANDB_PROJECT": ("wandb.project", logger.wandb.project, logger.wandb_enabled),
        "WANDB_MODE": ("wandb.mode", logger.wandb.mode, logger.wandb_enabled),
        "WANDB_ENTITY": ("wandb.entity", logger.wandb.entity, logger.wandb_enabled and logger.wandb.entity is not None),
        "WANDB_NAME": ("wandb.name", logger.wandb.name, logger.wandb_enabled),
        "WANDB_DISABLED": ("wandb_enabled", True, logger.wandb_enabled),
        "MLFLOW_RUN_NAME": ("mlflow.name", logger.mlflow.name, logger.mlflow_enabled),
    }
    for variable, (key, value, enabled) in keys.items():
        if enabled and os.environ.get(variable) not in (None, "", value):
            yield f"{variable} is not read; logger.{key} = {value} is what counts"


def note_total_steps(config: Config, total: int) -> None:
    """Warn of a schedule that does not fit a run whose epochs end after `total` steps."""
    if total != config.algorithm.max_num_steps:
        options = dataclasses.replace(config.algorithm, max_num_steps=total)
        for note in _schedule_notes(dataclasses.replace(config, algorithm=options)):
            log.warning(note)


def _schedule_notes(config: Config) -> Iterator[str]:
    """Yield that the learning rate never reaches its maximum or minimum, if the number of steps is known."""
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


def _kl_estimate(config: Config, loss: LossConfig) -> str:
    """Return a note on an estimator of the KL whose gradient is not the KL's. Empty if there is none."""
    kind, estimate = f"{LOSS}.reference_policy_kl_type", loss.reference_policy_kl_type
    if not compares(config) or config.algorithm.loss is not None:
        return ""
    if loss.use_kl_in_reward and estimate != "k1":
        why = f"with {LOSS}.use_kl_in_reward it hardly holds the policy near the reference, because as a reward only k1"
        return f"{kind} = {estimate}: {why} has the gradient of the KL ({kind}=k1)"
    if not loss.use_kl_in_reward and estimate == "k1" and not loss.use_bias_correction_kl:
        why = "its gradient averages to zero, so it hardly holds the policy near the reference"
        return f"{kind} = k1: {why} ({LOSS}.use_bias_correction_kl=true, or {kind}=k2)"
    return ""


def _steps_without_a_ratio(config: Config, loss: LossConfig) -> str:
    """Return a note on optimizer steps that ignore that the policy has changed since the rollout. Empty if there are
    none. NeMo-RL takes them as well (`disable_ppo_ratio`); TRL's RLOO has a clipped ratio."""
    if loss.policy_loss != "reinforce" or config.algorithm.loss is not None or not reads_ratios(config):
        return ""
    if (steps := optimizer_steps(config)) == 1:
        return ""
    return (
        f"{LOSS}.policy_loss = reinforce: a rollout has {steps} optimizer steps, and without a ratio all but the "
        "first train on samples of older weights as if they were new "
        f"({BATCH}={samples_per_step(config)} makes one step, {LOSS}.policy_loss=clip has a ratio)"
    )


def _adapter_dropout(config: Config) -> Iterator[str]:
    peft = config.policy.megatron_cfg.peft
    if peft.enabled and peft.dropout:
        why = "training applies it, and the logprobs that ratios compare with are computed without it"
        yield f"{MEGATRON}.peft.dropout = {peft.dropout:g}: {why}, so that ratios are not exactly 1 on a fresh rollout"
