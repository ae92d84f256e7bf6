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


def test_the_variables_of_wandb_are_defaults(monkeypatch):
    on = ["logger.wandb_enabled=true"]
    for variable, value in {"WANDB_MODE": "offline", "WANDB_PROJECT": "mine"}.items():
        monkeypatch.setenv(variable, value)
    found = compose_config(on).logger.wandb
    assert (found.mode, found.project) == ("offline", "mine")
    assert compose_config([*on, "logger.wandb.project=other"]).logger.wandb.project == "other"
    monkeypatch.setenv("WANDB_PROJECT", "")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    found = compose_config(on).logger.wandb
    assert (found.mode, found.project) == ("disabled", "nemo_rl_lite")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ConfigError, match="environment variable WANDB_MODE"):
        compose_config([])
