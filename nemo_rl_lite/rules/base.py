"""What a rule is, and how all of them are asked.

A rule names the keys it reads, so that a key with a wrong type does not also break every rule that uses it, and the
algorithm it is about, where others do not use what it checks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation

Check = Callable[[Config], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    keys: tuple[str, ...]
    check: Check
    algorithms: tuple[str, ...]
    """All where empty."""


RULES: list[Rule] = []


def rule(*keys: str, algorithm: str | tuple[str, ...] = ()) -> Callable[[Check], Check]:
    """Register a check with the keys (or sections) it reads; for one `algorithm`, several, or all."""
    algorithms = (algorithm,) if isinstance(algorithm, str) else algorithm

    def register(check: Check) -> Check:
        RULES.append(Rule(keys, check, algorithms))
        return check

    return register


def check_rules(config: Config, unusable: frozenset[str] = frozenset()) -> list[Violation]:
    """Everything the rules find wrong. Rules that read a key of `unusable`, or are about another
    algorithm, are left out."""
    return [
        violation
        for rule in RULES
        if (not rule.algorithms or config.algorithm.name in rule.algorithms)
        and not any(_overlap(key, bad) for key in rule.keys for bad in unusable)
        for violation in rule.check(config)
    ]


def _overlap(key: str, bad: str) -> bool:
    return key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.")
