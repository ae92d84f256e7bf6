"""The jobs of a sweep: what each of them changes, and how they ended."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from nemo_rl_lite.config.keys import parse_override
from nemo_rl_lite.config.overrides import SWEEP_FOLDER
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.run.flags import SWEEP, Flags

if TYPE_CHECKING:
    from nemo_rl_lite.observability.summary import Summary


@dataclass
class Sweep:
    """What came of the jobs, in their order: overrides and folder of each, and its summary or exit status."""

    overrides: Sequence[str]
    """Of the whole sweep."""
    ended: list[tuple[Sequence[str], Path, "Summary | int"]] = field(default_factory=list)

    @property
    def failed(self) -> list[tuple[int, int]]:
        """Number and exit status of each job that failed."""
        return [(number, end) for number, (_, _, end) in enumerate(self.ended) if isinstance(end, int)]

    def show(self) -> None:
        """Print a table of the jobs."""
        from nemo_rl_lite.observability.console import RunConsole

        console = RunConsole()
        swept = tuple(f"{one.partition('=')[0]}=" for one in self.overrides if values_of(one) != [one])
        rows = []
        for number, (overrides, _, end) in enumerate(self.ended):
            own = " ".join(override for override in overrides if override.startswith(swept))
            seconds = "-" if isinstance(end, int) else f"{end.seconds_a_step:.2f}"
            rows.append([f"#{number}", own, _result(end), seconds])
        console.table("sweep", ["", "job", "result", "s a step"], rows)
        if self.ended:
            sys.stdout.write(f"one page of all jobs: nrl-lite report {self.ended[0][1].parent}\n")


def jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of each job of a sweep, without the sweep's folder, in the order of Hydra's basic sweeper."""
    own = [override for override in overrides if not override.startswith(f"{SWEEP_FOLDER}=")]
    return map(list, itertools.product(*(values for override in own if (values := values_of(override)))))


def sweep_problems(flags: Flags, overrides: Sequence[str]) -> list[Violation]:
    """The problems of a sweep that has fewer than two jobs, or one of them twice, or endlessly many."""
    if not flags.sweeps:
        return []
    found = list(jobs(overrides))
    if ranges := [one.partition("=") for one in overrides if _is_continuous(one)]:
        rule_text = "has no list of values, and a sweep has a run for each value"
        return [Violation(key, given, rule_text, f"{key}=1,2,3 or {key}=range(1,4)") for key, _, given in ranges]
    if all(len(values_of(override)) == 1 for override in overrides) or any(map(_is_empty, overrides)):
        rule_text, fix = "no key has several values", f"algorithm.seed=1,2,3, or leave {SWEEP[1]} out"
        return [Violation(SWEEP[1], None, rule_text, fix)]
    twice = next((job for index, job in enumerate(found) if job in found[:index]), None)
    if twice is None:
        return []
    return [Violation(SWEEP[1], None, f"{' '.join(twice)} is one job twice", "give each value once")]


def values_of(argument: str) -> list[str]:
    """An override for each value of the sweep; empty where there is none, or only Hydra knows them."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return [argument]
    if not override.is_sweep_override():
        return [argument]
    key = argument.partition("=")[0]
    return [f"{key}={value}" for value in override.sweep_string_iterator()] if override.is_discrete_sweep() else []


def _is_continuous(argument: str) -> bool:
    """Whether an override sweeps over all numbers between two."""
    override = parse_override(argument)
    return override is not None and override.is_sweep_override() and not override.is_discrete_sweep()


def _is_empty(argument: str) -> bool:
    """Whether an override sweeps over no value."""
    override = parse_override(argument)
    return override is not None and override.is_discrete_sweep() and not values_of(argument)


def _result(end: "Summary | int") -> str:
    if isinstance(end, int):
        return f"failed (status {end})"
    pairs = {
        "accuracy": (end.accuracy_before, end.accuracy_after),
        "validation loss": (end.val_loss_before, end.val_loss_after),
    }
    shown = [f"{name} {_number(before)} -> {_number(after)}" for name, (before, after) in pairs.items() if after]
    return ", ".join(shown) or f"{end.steps} steps"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
