"""What a run logs and prints of its start."""

from collections.abc import Mapping

from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.metrics_log import MetricsLog, under
from nemo_rl_lite.observability.timer import Timer, seconds_since_start

# Shorter parts are left out of the line on the terminal, in seconds.
_SHOWN_S = 0.05


def report_start(setup: Timer, step: int, metrics: MetricsLog, console: RunConsole) -> None:
    """Log `timing/setup/...` at `step` and print a line of it. `total` is the time since the command. `<group>/<part>`
    are parts within a group's processes, which ran at the same time as others; the launcher's parts follow each
    other."""
    seconds = setup.take() | {"total": seconds_since_start()}
    metrics.log(step, under("timing/setup", seconds))
    console.say(start_line(seconds))


def start_line(seconds: Mapping[str, float]) -> str:
    """Return one line with the total, the launcher's parts in their order, and what each group's processes did."""
    own = {name: value for name, value in seconds.items() if "/" not in name and name != "total"}
    own["other"] = seconds["total"] - sum(own.values())
    shown = [f"started in {seconds['total']:.1f} s: {_parts(own)}"]
    for group in dict.fromkeys(name.partition("/")[0] for name in seconds if "/" in name):
        inside = {name.partition("/")[2]: value for name, value in seconds.items() if name.startswith(f"{group}/")}
        shown.append(f"{group}'s processes: {_parts(inside)}")
    return "; ".join(shown)


def _parts(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= _SHOWN_S)
