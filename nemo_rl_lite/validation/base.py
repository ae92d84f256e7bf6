"""Rules about keys that contradict each other: functions that yield violations.

A rule refuses a run that would crash or hang after minutes, or that would train something other than what was asked.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import AlgorithmConfig
from nemo_rl_lite.errors import Violation

Check = Callable[[Config], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    reads: tuple[str, ...]
    check: Check
    options: type[AlgorithmConfig]


RULES: list[Rule] = []


def rule(*reads: str, options: type[AlgorithmConfig] = AlgorithmConfig) -> Callable[[Check], Check]:
    """Register a check for these algorithms. It is skipped if a section or key that it `reads` has a wrong type."""

    def register(check: Check) -> Check:
        RULES.append(Rule(reads, check, options))
        return check

    return register


def check_rules(config: Config, unusable: frozenset[str] = frozenset()) -> list[Violation]:
    """Return every violation. Rules that read a key of `unusable` are skipped."""
    return [
        violation
        for rule in RULES
        if isinstance(config.algorithm, rule.options)
        and not any(is_of(bad, rule.reads) or is_of(read, [bad]) for bad in unusable for read in rule.reads)
        for violation in rule.check(config)
    ]


def is_of(key: str, names: Sequence[str]) -> bool:
    """Return whether `key` is one of `names`, or below one of them."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)
