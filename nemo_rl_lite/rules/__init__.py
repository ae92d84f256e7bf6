"""What configuration fields must mean together. Each rule is a small function that yields what is wrong."""

from nemo_rl_lite.rules import (
    algorithm,
    checkpoint,
    data,
    generation,
    layout,
    logger,
    model,
    offload,
    policy,
    profile,
    reward,
)
from nemo_rl_lite.rules.base import check_rules

__all__ = [
    "algorithm",
    "check_rules",
    "checkpoint",
    "data",
    "generation",
    "layout",
    "logger",
    "model",
    "offload",
    "policy",
    "profile",
    "reward",
]
