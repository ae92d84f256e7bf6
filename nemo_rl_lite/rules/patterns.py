"""Rules about the regular expressions of rewards."""

import re
from collections.abc import Iterator

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rewards.judge import terms_of
from nemo_rl_lite.rules.base import rule

# What is meant to be a command of LaTeX begins with an escape where it has one backslash (or three): \b, \f or \t.
_LATEX = re.compile(r"(?<!\\)(?:\\\\)*\\(boxed|begin|frac|text)")
# Two backslashes before the letter of a class; LaTeX's commands, such as \\sqrt, go on with letters.
_CLASS = re.compile(r"(?<!\\)\\\\([dswDSW])(?![A-Za-z])")


@rule("reward", options=RolloutAlgorithmConfig)
def formats_have_a_pattern(config: Config) -> Iterator[Violation]:
    for term in terms_of(config.reward):
        key, pattern = f"{term.section}.kwargs.pattern", term.kwargs.get("pattern")
        if term.name != "format":
            continue
        fix = f"{key}='<answer>.*</answer>'"
        if not isinstance(pattern, str):
            yield Violation(key, pattern, "must be a regular expression", fix)
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            yield Violation(key, pattern, f"is no regular expression: {error}", fix)
            continue
        if trouble := mistaken_backslash(pattern):
            yield Violation(key, pattern, trouble, f"{key}='.*\\\\boxed\\{{\\d+\\}}' finds \\boxed{{42}}")


def mistaken_backslash(pattern: str) -> str:
    """Say what a pattern finds or misses because of a backslash too few or too many; empty where nothing is odd."""
    if found := _LATEX.search(pattern):
        return f"does not find \\{found[1]}, because a pattern has two backslashes for one of the text"
    if found := _CLASS.search(pattern):
        return f"finds a backslash and {found[1]}, because it has two backslashes; with one, \\{found[1]} is a class"
    return ""
