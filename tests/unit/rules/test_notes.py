"""What may be meant is not refused, but told."""

import pytest

from nemo_rl_lite.config.overrides import given_keys
from nemo_rl_lite.rules.compose import compose_command
from nemo_rl_lite.rules.notes import notes

WARM_UP = "policy.megatron_cfg.scheduler.lr_warmup_iters"


def told(*arguments: str) -> str:
    return " | ".join(notes(compose_command(arguments), given_keys(arguments)))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("data.system_prompt='One.\\nTwo.'", "data.system_prompt has a backslash and an n"),
        ("data.system_prompt='\\neq is unequal, \\nabla a gradient'", ""),
        ("data.system_prompt='One.\nTwo.'", ""),
        (f"{WARM_UP}=120", f"{WARM_UP} = 120: the run has 120 optimizer steps"),
        (f"{WARM_UP}=119", ""),
        ("algorithm.max_num_steps=1", ""),
    ],
)
def test_notes(argument, words):
    found = told(argument)
    assert words in found and bool(found) == bool(words)


def test_variables_of_trackers_that_keys_replace(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert told() == ""
    wandb = ("logger.wandb_enabled=true", "logger.wandb.mode=offline")
    found = told("logger.mlflow_enabled=true", *wandb)
    assert "MLFLOW_TRACKING_URI is not read; logger.mlflow.tracking_uri = outputs/mlruns" in found
    assert "WANDB_PROJECT is not read; logger.wandb.project = nemo_rl_lite" in found
    same = "logger.mlflow.tracking_uri='http://elsewhere:5000'"
    assert told("logger.mlflow_enabled=true", same, *wandb, "logger.wandb.project=mine") == ""
