"""What a command is told without being refused, because it may be what is meant."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nemo_rl_lite.config.active import idle_note
from nemo_rl_lite.config.keys import known_variables, unread_variables
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.rules.layout import MEGATRON
from nemo_rl_lite.rules.loss import estimate_as_a_reward, steps_without_a_ratio
from nemo_rl_lite.rules.steps import endless_warm_up, unfinished_decay


def notes(config: Config, given: Sequence[str]) -> Iterator[str]:
    """What to tell who gives a command with the keys `given`."""
    if unread := unread_variables():
        known = ", ".join(sorted(known_variables()))
        yield f"without effect, because nothing reads it: {', '.join(unread)} (read are {known})"
    if idle := idle_note(config, given):
        yield idle
    if f"{MEGATRON}.scheduler.lr_warmup_iters" in given and (told := endless_warm_up(config)):
        yield told
    if not {f"{MEGATRON}.scheduler.{name}" for name in ("lr_decay_style", "lr_decay_iters")}.isdisjoint(given):
        yield from unfinished_decay(config)
    yield from filter(None, (estimate_as_a_reward(config), steps_without_a_ratio(config)))
    yield from _unread_environment(config)


def notes_elsewhere(config: Config) -> Iterator[str]:
    """What to tell who plans a run, or submits it, which a run itself would refuse: it may be on another machine."""
    named = config.checkpoint.resume_from
    if named is not None and not Path(named).expanduser().is_dir():
        yield f"checkpoint.resume_from = {named}: there is no such folder here"


def show(found: Iterable[str]) -> None:
    """Print notes."""
    for note in found:
        sys.stderr.write(f"note: {note}\n")


def _unread_environment(config: Config) -> Iterator[str]:
    """The variables of trackers that the configuration's own keys replace."""
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
