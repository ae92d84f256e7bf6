"""Trackers are asked for where they are there, and where they know their user."""

import pytest

from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rules import logger
from nemo_rl_lite.rules.compose import compose_config


def installed(monkeypatch, *packages: str) -> None:
    monkeypatch.setattr(logger, "find_spec", lambda name: name if name in packages else None)


def test_without_its_client_the_fix_is_named(monkeypatch):
    installed(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"logger.mlflow_enabled = True\n.*not installed here\n.*nemo_rl_lite\[mlflow\]"
    ):
        compose_config(["logger.mlflow_enabled=true"])
    compose_config([])


def test_a_database_needs_more_than_the_client(monkeypatch):
    installed(monkeypatch, "mlflow")
    with pytest.raises(ConfigError, match=r"tracking_uri = 'sqlite:///x.db'\n.*\n.*pip install mlflow"):
        compose_config(["logger.mlflow_enabled=true", "logger.mlflow.tracking_uri=sqlite:///x.db"])
    compose_config(["logger.mlflow_enabled=true", "logger.mlflow.tracking_uri=https://mlflow.example"])
    installed(monkeypatch, "mlflow", "sqlalchemy")
    compose_config(["logger.mlflow_enabled=true", "logger.mlflow.tracking_uri=sqlite:///x.db"])


def test_wandb_finds_its_key_where_wandb_looks(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="wandb login"):
        compose_config(["logger.wandb_enabled=true"])
    (tmp_path / "keys").write_text("machine api.wandb.ai\n  login user\n  password 0123456789\n")
    compose_config(["logger.wandb_enabled=true"])
    (tmp_path / "keys").write_text("machine api.wandb.ai\n  passwrd\n")
    with pytest.raises(ConfigError, match="wandb login"):
        compose_config(["logger.wandb_enabled=true"])
