"""Compose a configuration, and check combinations of keys. Importing this registers the rules."""

from nemo_rl_lite.validation import algorithm, data, engine, layout, megatron, rewards
from nemo_rl_lite.validation.compose import check_rules

__all__ = ["algorithm", "check_rules", "data", "engine", "layout", "megatron", "rewards"]
