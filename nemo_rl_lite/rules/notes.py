"""What a command is told without being refused, because it may be what is meant."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.variables import known_variables, unread_variables
from nemo_rl_lite.rules.algorithm import estimate_as_a_reward, steps_without_a_ratio
from nemo_rl_lite.rules.layout import MEGATRON
from nemo_rl_lite.rules.steps import schedule_notes


def notes(config: Config, given: Sequence[str]) -> Iterator[str]:
    """What to tell who gives a command with the keys `given`."""
    if unread := unread_variables():
        known = ", ".join(sorted(known_variables()))
        yield f"without effect, because nothing reads it: {', '.join(unread)} (read are {known})"
    if any(key.startswith(f"{MEGATRON}.scheduler.") for key in given):
        yield from schedule_notes(config)
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
