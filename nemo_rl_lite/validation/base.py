"""Rules about keys that contradict each other.

A rule refuses a run that would crash or hang after minutes, or that would train something else than asked. It names the
sections and keys that it reads, and is skipped where one of them has a wrong type; `options` limits it to algorithms.
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
    """Register a check, the sections and keys that it reads, and the algorithms that it is for."""

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
