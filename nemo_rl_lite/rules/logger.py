"""Rules about trackers."""

import netrc
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.host.machine import WANDB, wandb_login
from nemo_rl_lite.rules.base import rule

_DATABASES = ("sqlite:", "postgresql:", "mysql:", "mssql:")
_STORES = ("http://", "https://", "file://", "databricks")


@rule("logger.wandb_enabled", "logger.wandb.mode")
def wandb_can_log_in(config: Config) -> Iterator[Violation]:
    if config.logger.wandb_enabled and config.logger.wandb.mode == "online" and not _wandb_key():
        rule_text = "W&B has no API key on this machine"
        fix = "run `wandb login`, set WANDB_API_KEY, or logger.wandb.mode=offline"
        yield Violation("logger.wandb.mode", "online", rule_text, fix)


@rule("logger.wandb_enabled", "logger.wandb.project")
def wandb_takes_the_project(config: Config) -> Iterator[Violation]:
    project, key = config.logger.wandb.project, "logger.wandb.project"
    if config.logger.wandb_enabled and (bad := sorted(set(project) & set("/\\#?%:"))):
        rule_text = f"W&B takes no {' '.join(bad)} in it; a team is logger.wandb.entity"
        yield Violation(key, project, rule_text, f"{key}={re.split('[/#?%:]', project)[-1] or 'mine'}")


@rule("logger.wandb_enabled", "logger.wandb.entity")
def wandb_takes_the_entity(config: Config) -> Iterator[Violation]:
    entity, key = config.logger.wandb.entity, "logger.wandb.entity"
    if config.logger.wandb_enabled and entity is not None and not re.fullmatch(r"[\w.-]+", entity):
        rule_text = "is no user or team of W&B, whose names have letters, digits, -, _ and . only"
        yield Violation(key, entity, rule_text, f"{key}=NAME, as in the address https://wandb.ai/NAME")


@rule("logger.mlflow_enabled")
def mlflow_is_there(config: Config) -> Iterator[Violation]:
    if config.logger.mlflow_enabled and find_spec("mlflow") is None:
        fix = "pip install -c constraints.txt 'nemo_rl_lite[mlflow]' (mlflow-skinny), or logger.mlflow_enabled=false"
        yield Violation("logger.mlflow_enabled", True, "MLflow's client is not installed here", fix)


@rule("logger.mlflow_enabled", "logger.mlflow.tracking_uri")
def mlflow_has_its_database(config: Config) -> Iterator[Violation]:
    uri, key = config.logger.mlflow.tracking_uri, "logger.mlflow.tracking_uri"
    if config.logger.mlflow_enabled and "://" in uri and not uri.startswith((*_STORES, *_DATABASES)):
        fix = f"{key}=http://SERVER:5000, or {key}=./mlruns for a folder"
        yield Violation(key, uri, "MLflow has no store of this kind", fix)
    of_a_database = uri.startswith(_DATABASES)
    if config.logger.mlflow_enabled and of_a_database and find_spec("mlflow") and not find_spec("sqlalchemy"):
        fix = "pip install mlflow, or a server's address or a folder"
        yield Violation(key, uri, "a database needs the full mlflow package", fix)


def _wandb_key() -> bool:
    # A self-hosted server may need no key, or a key that is kept elsewhere. W&B reports it if one is missing.
    if os.environ.get("WANDB_BASE_URL"):
        return True
    try:
        return bool(wandb_login(os.environ, WANDB))
    except (OSError, netrc.NetrcParseError):
        return False
