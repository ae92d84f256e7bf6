"""What a person at the terminal sees: one line a step, and a table at the end."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

log = logging.getLogger(__name__)

# Phase shown -> the timers it sums, and its colour.
PHASES = {
    "generate": (("generation",), "cyan"),
    "logprob": (("logprob_inference_prep", "policy_and_reference_logprobs"), "yellow"),
    "train": (("training_prep", "policy_training"), "green"),
    "refit": (("prepare_for_generation/transfer_and_update_weights",), "magenta"),
}
BAR_CELLS = 6
# Columns of a table where there is no terminal to fit; rich would take 80.
PLAIN_WIDTH = 100
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class RunConsole:
    """Progress on stdout, plain lines where that is no terminal; the same lines go to the run's log."""

    def __init__(self, console: Console | None = None):
        self.console = console or _standard_console()

    def say(self, message: str) -> None:
        log.info(message)
        self.console.print(message, markup=False)

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Show that something long is going on."""
        if self.console.is_terminal:
            with self.console.status(what):
                yield
        else:
            self.say(f"{what} ...")
            yield

    def step(self, step: int, steps: int, values: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """`step 3/30  reward 0.412  kl 0.0021  1.32 s  generate ██▌ 0.41 ...`: values, then a bar for each phase, full
        where the phase takes the whole step."""
        total = seconds["total_step_time"]
        line = Text(f"step {step:>{len(str(steps))}}/{steps}  ")
        line.append("  ".join(f"{name} {value:.3g}" for name, value in values.items()))
        line.append(f"  {total:.2f} s ")
        for phase, (timers, colour) in phases_in(seconds).items():
            spent = sum(seconds.get(timer, 0.0) for timer in timers)
            line.append(f" {phase} ")
            line.append(bar(spent / total), style=colour)
            line.append(f" {spent:.2f}")
        log.info(line.plain)
        self.console.print(line)

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold")
        for index, header in enumerate(headers):
            table.add_column(header, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def _standard_console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def phases_in(timers: Iterable[str]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Of PHASES, those that any of the timers belongs to: not every algorithm has every phase."""
    present = set(timers)
    return {phase: (names, colour) for phase, (names, colour) in PHASES.items() if not present.isdisjoint(names)}


def bar(share: float) -> str:
    """A bar of BAR_CELLS characters, filled to `share` of 1 in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * BAR_CELLS * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(BAR_CELLS, "·")
