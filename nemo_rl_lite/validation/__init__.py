"""Rules about combinations of configuration keys. Each rule is a function that yields violations."""

from nemo_rl_lite.validation import algorithm, data, engine, layout, rewards
from nemo_rl_lite.validation.base import check_rules

__all__ = ["algorithm", "check_rules", "data", "engine", "layout", "rewards"]
