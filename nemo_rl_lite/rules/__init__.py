"""Rules about combinations of configuration keys. Each rule is a small function that yields violations."""

from nemo_rl_lite.rules import (
    algorithm,
    checkpoint,
    data,
    generation,
    judge,
    kwargs,
    layout,
    logger,
    loss,
    machine,
    model,
    offload,
    patterns,
    policy,
    profile,
    reward,
    vllm,
)
from nemo_rl_lite.rules.base import check_rules

__all__ = [
    "algorithm",
    "check_rules",
    "checkpoint",
    "data",
    "generation",
    "judge",
    "kwargs",
    "layout",
    "logger",
    "loss",
    "machine",
    "model",
    "offload",
    "patterns",
    "policy",
    "profile",
    "reward",
    "vllm",
]
