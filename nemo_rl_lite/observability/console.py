"""Print a run: a line for its start and for each step, samples now and then, tables at the end."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl_lite.errors import printable
from nemo_rl_lite.observability.live import doing
from nemo_rl_lite.observability.sinks import Sample
from nemo_rl_lite.observability.timer import Timer, seconds_since_start
from nemo_rl_lite.observability.trackers import MetricsLog, under

log = logging.getLogger(__name__)
ENGINES_IDLE = "timing/rollout/engines_idle"
"""Metric of asynchronous runs: seconds in which the engines had no request."""
# Shown phases: their timers and colour.
PHASES = {
    "generate": (("generation",), "cyan"),
    "logprob": (("logprob_inference_prep", "teacher_logprob_inference", "policy_and_reference_logprobs"), "yellow"),
    "train": (("training_prep", "policy_training"), "green"),
    "refit": (("prepare_for_generation/transfer_and_update_weights",), "magenta"),
}
BAR_CELLS = 6
# Smallest share of the step's time at which a checkpoint is shown.
WORTH_SHOWING = 0.05
# Number of values in a sparkline.
TREND_VALUES = 12
# Seconds between two progress lines of a long operation, without a terminal.
_TOLD_EVERY_S = 30
# Number of recent steps that predict the remaining time.
_RECENT_STEPS = 20
# Maximum characters of a shown prompt or response.
_SHOWN_CHARACTERS = 600
# Width of tables without a terminal; rich would use 80 columns.
PLAIN_WIDTH = 100
# Number of parts that the start line names, and the smallest share of a named part.
_SHOWN_PARTS, _SHOWN_SHARE = 3, 0.1
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"


class RunConsole:
    """Prints progress, as plain lines without a terminal, and writes the lines to the run's log."""

    def __init__(self, console: Console | None = None):
        if console is None:
            console = Console(highlight=False, soft_wrap=True)
            if not console.is_terminal:
                console.width = PLAIN_WIDTH
        self.console, self._pace = console, Pace()

    def say(self, message: str) -> None:
        log.info(message)
        # Without a terminal each message stays on one line; a terminal wraps.
        self.console.print(message, markup=False, soft_wrap=not self.console.is_terminal)

    @contextmanager
    def busy(self, what: str, announced: bool = True) -> Iterator[Callable[[str], None]]:
        """Show that a long operation is running, with the progress that the block reports. Without a terminal, print a
        line now and then, and one at the start if `announced`."""
        said = time.monotonic()
        with ExitStack() as stack:
            tell_others = stack.enter_context(doing(what))
            status = stack.enter_context(self.console.status(what)) if self.console.is_terminal else None
            if status is None and announced:
                self.say(f"{what} ...")

            def tell(progress: str) -> None:
                nonlocal said
                tell_others(progress)
                if status is not None:
                    status.update(f"{what}: {progress}")
                elif time.monotonic() - said >= _TOLD_EVERY_S:
                    said = time.monotonic()
                    self.say(f"{what}: {progress}")

            yield tell

    def step(
        self,
        step: int,
        steps: int,
        values: Mapping[str, float],
        seconds: Mapping[str, float],
        trend: Sequence[float] = (),
        idle: float | None = None,
    ) -> None:
        """Print `step 3/30  reward 0.412 ▁▃▅  kl 0.0021  1.32 s  36 s left  generate ██▌ 0.41 ...`.

        The first value has its `trend`. Bars show the share of the step that each phase, a long checkpoint and the
        `idle` seconds of asynchronous engines take. A narrow terminal gets neither bars nor trend."""
        left = self._pace.left(step, steps, seconds["total_step_time"])
        head = f"step {step:>{len(str(steps))}}/{steps}"
        line = _step_line(head, values, seconds, left, trend, idle, bars=True)
        log.info(line.plain)
        narrow = self.console.is_terminal and line.cell_len > self.console.width
        if narrow:
            line = _step_line(head, values, seconds, left, (), idle, bars=False)
        self.console.print(line, soft_wrap=not narrow)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Print prompt, response and reward of each sample."""
        table = Table(title=f"samples of step {step}", title_justify="left", title_style="bold", show_lines=True)
        table.add_column("prompt", ratio=2)
        table.add_column("response", ratio=3)
        table.add_column("reward", justify="right")
        for sample in samples:
            table.add_row(Text(readable(sample.prompt)), Text(readable(sample.response)), f"{sample.reward:.3g}")
        self.console.print(table)

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table()
        for index, header in enumerate(headers):
            table.add_column(header, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        # rich would wrap the title to the width of the table.
        self.console.print(Text(title, style="bold"), soft_wrap=not self.console.is_terminal)
        self.console.print(table, soft_wrap=not self.console.is_terminal)


def _step_line(
    head: str,
    values: Mapping[str, float],
    seconds: Mapping[str, float],
    left: float,
    trend: Sequence[float],
    idle: float | None,
    bars: bool,
) -> Text:
    line, total = Text(head), seconds["total_step_time"]
    for place, (name, value) in enumerate(values.items()):
        line.append(f"  {name} {value:.3g}")
        if place == 0 and len(trend) > 1:
            line.append(f" {sparkline(trend)}", style="blue")
    line.append(f"  {total:.2f} s")
    line.append(f"  {duration(left)} left " if left else " ")
    shown = [
        (phase, sum(seconds.get(timer, 0.0) for timer in timers), colour)
        for phase, (timers, colour) in phases_in(seconds).items()
    ]
    saving = seconds.get("checkpointing", 0.0)
    if saving >= WORTH_SHOWING * total:
        shown.append(("checkpoint", saving, "blue"))
    if idle is not None:
        shown.append(("engines idle", idle, "red"))
    for phase, spent, colour in shown:
        line.append(f" {phase} ")
        line.append(f"{bar(spent / total)} " if bars else "", style=colour)
        line.append(f"{spent:.2f}", style="" if bars else colour)
    return line


def phases_in(timers: Iterable[str]) -> dict[str, tuple[tuple[str, ...], str]]:
    present = set(timers)
    return {phase: (names, colour) for phase, (names, colour) in PHASES.items() if not present.isdisjoint(names)}


def bar(share: float) -> str:
    """Return a bar of BAR_CELLS characters, filled to `share` with a resolution of 1/8 character."""
    eighths = round(max(0.0, min(1.0, share)) * BAR_CELLS * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(BAR_CELLS, "·")


class Pace:
    """Predicts the remaining time from recent steps, including the time between them."""

    def __init__(self) -> None:
        self._ended: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)

    def left(self, step: int, steps: int, seconds: float) -> float:
        """Return the predicted seconds until the last step is done, after `step`, which took `seconds`."""
        now = time.monotonic()
        if self._ended and self._ended[-1][0] != step - 1:
            # The run resumed from an earlier checkpoint.
            self._ended.clear()
        if not self._ended:
            self._ended.append((step - 1, now - seconds))
        self._ended.append((step, now))
        first, since = self._ended[0]
        return (steps - step) * (now - since) / (step - first)


def duration(seconds: float) -> str:
    """Return `42 s`, `7 min` or `3 h 05 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def sparkline(values: Sequence[float]) -> str:
    """Draw the last TREND_VALUES values in eight heights; NaN is a blank."""
    shown = values[-TREND_VALUES:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        _HEIGHTS[round((value - low) / span * (len(_HEIGHTS) - 1))] if math.isfinite(value) else " " for value in shown
    )


def readable(text: str) -> str:
    """Escape and shorten a model's text for a terminal."""
    plain = printable(text, kept="\n\t")
    if len(plain) <= _SHOWN_CHARACTERS:
        return plain
    half = _SHOWN_CHARACTERS // 2
    return f"{plain[:half]} ... {plain[-half:]}"


def report_start(
    setup: Timer, step: int, metrics: MetricsLog, console: RunConsole, predicted: Mapping[str, float]
) -> None:
    """Log the `predicted` memory and `timing/setup/...` at `step`, and print the start line. `total` is the time since
    the command. The launcher's parts are sequential; parts of worker processes, `<group>/<part>`, overlap."""
    seconds = setup.take() | {"total": seconds_since_start()}
    metrics.log(step, {**predicted, **under("timing/setup", seconds)})
    console.say(start_line(seconds))


def start_line(seconds: Mapping[str, float]) -> str:
    """Return a line with the total and the longest of the launcher's parts."""
    total = seconds["total"]
    own = {name: value for name, value in seconds.items() if "/" not in name and name != "total"}
    own["other"] = total - sum(own.values())
    longest = sorted(own.items(), key=lambda part: -part[1])[:_SHOWN_PARTS]
    shown = [f"{name.replace('_', ' ')} {value:.1f}" for name, value in longest if value >= _SHOWN_SHARE * total]
    return f"started in {total:.1f} s" + (f": {', '.join(shown)}" if shown else "")
