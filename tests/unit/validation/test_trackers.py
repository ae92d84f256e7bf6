"""Trackers are asked for where they are there, and where they know their user."""

import pytest

from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.validation import algorithm
from nemo_rl_lite.validation.compose import compose_config


def test_mlflow_has_its_client(monkeypatch):
    monkeypatch.setattr(algorithm, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logger\.mlflow_enabled"):
        compose_config(["logger.mlflow_enabled=true"])
    compose_config([])


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
