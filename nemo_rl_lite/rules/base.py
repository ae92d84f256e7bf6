"""What a rule is, and how all rules are checked.

A rule names the keys it reads, so that a key with a wrong type does not also break every rule that uses it, and the
options class of the algorithms that it is about, where other algorithms do not use what it checks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import AlgorithmConfig
from nemo_rl_lite.errors import Violation

Check = Callable[[Config], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    keys: tuple[str, ...]
    check: Check
    options: type[AlgorithmConfig]


RULES: list[Rule] = []


def rule(*keys: str, options: type[AlgorithmConfig] = AlgorithmConfig) -> Callable[[Check], Check]:
    """Register a check with the keys (or sections) it reads, for algorithms with these `options`."""

    def register(check: Check) -> Check:
        RULES.append(Rule(keys, check, options))
        return check

    return register


def check_rules(config: Config, unusable: frozenset[str] = frozenset()) -> list[Violation]:
    """Everything the rules find wrong. Rules that read a key of `unusable`, or are about other algorithms, are left
    out."""
    return [
        violation
        for rule in RULES
        if isinstance(config.algorithm, rule.options)
        and not any(_overlap(key, bad) for key in rule.keys for bad in unusable)
        for violation in rule.check(config)
    ]


def _overlap(key: str, bad: str) -> bool:
    return key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.")
