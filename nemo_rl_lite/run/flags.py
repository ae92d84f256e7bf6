"""The flags of a training command, apart from its overrides: which there are, and which go together."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_rl_lite.config.keys import known_keys, nearest_key
from nemo_rl_lite.errors import Violation

# This launcher's own flag: do everything up to the first process.
DRY_RUN = "--dry-run"
SWEEP = ("--multirun", "-m")
_CFG, _INFO = ("--cfg", "-c"), ("--info", "-i")
# What may follow a flag. The value of --info may be left out.
_VALUES = {
    _CFG: ("job", "hydra", "all"),
    _INFO: ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    ("--package", "-p"): None,
}
# Hydra's flags that print something instead of running.
_INFORMATION = ("--help", "-h", "--hydra-help", "--version", *_CFG, *_INFO)
# These belong to --cfg.
_OF_CFG = ("--resolve", "--package", "-p")
FLAGS = (*_INFORMATION, *_OF_CFG, *SWEEP, DRY_RUN)


@dataclass(frozen=True)
class Flags:
    """`given`: the flags with their values, in order."""

    given: tuple[str, ...]

    @property
    def sweeps(self) -> bool:
        return any(flag in SWEEP for flag in self.given)

    @property
    def dry_run(self) -> bool:
        return DRY_RUN in self.given

    @property
    def only_informs(self) -> bool:
        """Whether Hydra will print something (--help, --cfg job, ...) and run nothing."""
        return any(_name(flag) in _INFORMATION for flag in self.given)

    def problems(self) -> Iterator[Violation]:
        """What is wrong with the flags."""
        for flag in self.given:
            if flag.startswith("-") and _name(flag) not in FLAGS:
                yield _unknown(flag)
            elif "=" in flag and not any(_name(flag) in names for names in _VALUES):
                yield Violation(flag, None, "is a flag, which takes no value", f"write {_name(flag)}, or leave it out")
        names = {_name(flag) for flag in self.given}
        if names & set(_OF_CFG) and not names & set(_CFG):
            lonely = next(flag for flag in self.given if _name(flag) in _OF_CFG)
            yield Violation(lonely, None, "says how --cfg prints the configuration", f"--cfg job {lonely}")
        kinds = {_kind(name) for name in names if name in FLAGS}
        if len(kinds) > 1 and kinds != {DRY_RUN, SWEEP}:
            rule_text = "one of them runs, the other only prints"
            yield Violation(" ".join(self.given), None, rule_text, "drop one")


def split_arguments(arguments: Sequence[str]) -> tuple[Flags, list[str]]:
    """The flags (with their values) and the overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    for argument, previous in zip(arguments, ["", *arguments], strict=False):
        (flags if argument.startswith("-") or _follows(previous, argument) else overrides).append(argument)
    return Flags(tuple(flags)), overrides


def _follows(flag: str, argument: str) -> bool:
    """Whether `argument` is the value of the flag before it; an unknown flag takes anything but an override."""
    if not flag.startswith("-") or "=" in flag:
        return False
    if flag not in FLAGS:
        return "=" not in argument
    values = next((values for names, values in _VALUES.items() if flag in names), ())
    return values is None or argument in values


def _kind(name: str) -> object:
    return SWEEP if name in SWEEP else DRY_RUN if name == DRY_RUN else _INFORMATION


def _name(flag: str) -> str:
    return flag.partition("=")[0]


def _unknown(flag: str) -> Violation:
    close = difflib.get_close_matches(_name(flag), FLAGS, n=1, cutoff=0.8)
    key = nearest_key(_name(flag).lstrip("-").replace("-", "_"), known_keys())
    if close:
        fix = f"did you mean {close[0]}?"
    else:
        fix = f"options are written as key=value: {key}=..." if key else "see --help; options are written as key=value"
    return Violation(flag, None, "is no flag of this command", fix)
