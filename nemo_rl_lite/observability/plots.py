"""Pictures of a run: its curves, and device memory by phase, predicted and measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from nemo_rl_lite.observability.console import PHASES, phases_in
from nemo_rl_lite.observability.metrics_log import MetricsLog, with_every_age
from nemo_rl_lite.observability.views import Panel, View

PREDICTED, MEASURED = "memory/predicted/", "memory/measured/"
LAST_STEPS = 5
"""Measured memory is the mean over this many last steps of the run, when everything has been allocated."""
OTHER = "other"
"""Measured memory of no component: CUDA contexts, captured graphs, buffers, sleeping engines."""
GIB, MIB = 2**30, 2**20
_BAR_WIDTH = 0.38

# Phase -> component -> bytes.
Stacks = Mapping[str, Mapping[str, float]]


def plot_run(metrics: MetricsLog, path: Path, title: str, view: View) -> None:
    """Draw the view's panels, the phases' seconds and, where tokens had several ages, these over steps as a PNG at
    `path`."""
    plt = _pyplot()
    _, ages = with_every_age(metrics.history)
    stacked = [_draw_phases, *([_draw_ages] if len(ages) > 1 else [])]
    count = len(view) + len(stacked)
    figure, axes = plt.subplots(1, count, figsize=(5 * count, 4), layout="constrained")
    figure.suptitle(title)
    for axis, panel in zip(axes, view, strict=False):
        _draw_panel(axis, panel, metrics)
    for axis, draw in zip(axes[len(view) :], stacked, strict=True):
        draw(axis, metrics)
    _save(figure, path)


def plot_memory(metrics: MetricsLog, path: Path, title: str) -> bool:
    """Draw two stacked bars a phase, predicted and measured, as a PNG at `path`. Return False, without a picture, where
    nothing was measured."""
    measured = stacks(metrics, MEASURED)
    if not measured:
        return False
    # On CPUs engines and activations are predicted but not measured: they could not be compared.
    known = {component for parts in measured.values() for component in parts}
    planned = stacks(metrics, PREDICTED)
    left_out = dict.fromkeys(name for parts in planned.values() for name in parts if parts[name] and name not in known)
    predicted = {phase: {name: parts[name] for name in parts if name in known} for phase, parts in planned.items()}
    bars = [parts for phases in (predicted, measured) for parts in phases.values()]
    unit, scale = ("GiB", GIB) if max(sum(parts.values()) for parts in bars) >= GIB else ("MiB", MIB)
    plt = _pyplot()
    from matplotlib.patches import Patch

    phases = [phase for phase in PHASES if phase in predicted or phase in measured]
    colours = _colours(bars)
    figure, axis = plt.subplots(figsize=(2.2 * len(phases) + 3, 4.5), layout="constrained")
    for half, hatch, stack in ((-1, "///", predicted), (1, "", measured)):
        for place, phase in enumerate(phases):
            x, bottom = place + half * _BAR_WIDTH / 2, 0.0
            for component, colour in colours.items():
                height = stack.get(phase, {}).get(component, 0.0) / scale
                style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
                axis.bar(x, height, _BAR_WIDTH, bottom=bottom, **style)
                bottom += height
    axis.set_xticks(range(len(phases)), phases)
    without = f"\nwithout {', '.join(left_out)}, not measured here" if left_out else ""
    what = f"{title}: device memory, predicted (hatched) and measured{without.replace('_', ' ')}"
    axis.set(title=what, ylabel=unit)
    # The legend lists components in the order of the stack, from the top.
    handles = [Patch(color=colour, label=name.replace("_", " ")) for name, colour in reversed(colours.items())]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    _save(figure, path)
    return True


def stacks(metrics: MetricsLog, prefix: str) -> dict[str, dict[str, float]]:
    """Bytes by phase and component of the metrics `<prefix><phase>/<component>`: means over the last steps."""
    names = dict.fromkeys(name for entry in metrics.history for name in entry if name.startswith(prefix))
    found: dict[str, dict[str, float]] = {}
    for name in names:
        phase, component = name.removeprefix(prefix).split("/")
        _, values = metrics.series(name)
        found.setdefault(phase, {})[component] = mean(values[-LAST_STEPS:])
    return found


def _colours(bars: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """A colour for each component that takes any memory, in the order of the stack, with OTHER on top."""
    taken = list(dict.fromkeys(name for parts in bars for name, nbytes in parts.items() if nbytes))
    named = {name: f"C{index}" for index, name in enumerate(name for name in taken if name != OTHER)}
    return named | ({OTHER: "lightgrey"} if OTHER in taken else {})


def _draw_panel(axis: Any, panel: Panel, metrics: MetricsLog) -> None:
    drawn: list[float] = []
    for curve in panel.curves:
        line, (steps, values) = "o--" if curve.held_out else "-", metrics.series(curve.metric)
        axis.plot(steps, values, line, label=curve.label, color=curve.colour)
        drawn += values
    axis.set(title=panel.title, xlabel="step")
    # A reward may lie outside the panel's limits.
    if panel.limits and all(panel.limits[0] <= value <= panel.limits[1] for value in drawn):
        axis.set(ylim=panel.limits)
    if len(panel.curves) > 1:
        axis.legend()


def _draw_phases(axis: Any, metrics: MetricsLog) -> None:
    steps, _ = metrics.series("timing/train/total_step_time")
    logged = {name for entry in metrics.history for name in entry}
    seconds = {
        phase: [sum(values) for values in zip(*(_timer(metrics, name, len(steps)) for name in timers), strict=True)]
        for phase, (timers, _) in phases_in(name.removeprefix("timing/train/") for name in logged).items()
    }
    axis.stackplot(steps, list(seconds.values()), labels=list(seconds), alpha=0.85)
    axis.set(title="seconds a step, by phase", xlabel="step")
    axis.legend(loc="upper right", fontsize="small")


def _draw_ages(axis: Any, metrics: MetricsLog) -> None:
    entries, names = with_every_age(metrics.history)
    steps = [entry for entry in entries if not names.keys().isdisjoint(entry)]
    shares = [[entry[name] for entry in steps] for name in names]
    axis.stackplot([entry["step"] for entry in steps], shares, labels=list(names.values()), alpha=0.85)
    axis.set(title="share of tokens by age (steps)", xlabel="step", ylim=(0, 1))
    axis.legend(loc="upper right", fontsize="small")


def _timer(metrics: MetricsLog, name: str, count: int) -> list[float]:
    _, values = metrics.series(f"timing/train/{name}")
    return values if len(values) == count else [0.0] * count


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
