"""Pictures of a run from its metrics."""

from pathlib import Path
from typing import Any

from nemo_rl_lite.observability.console import phases_in
from nemo_rl_lite.observability.metrics_log import MetricsLog
from nemo_rl_lite.observability.views import Panel, View


def plot_run(metrics: MetricsLog, path: Path, title: str, view: View) -> None:
    """The view's panels and phase times over steps, as one PNG at `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(view) + 1, figsize=(5 * (len(view) + 1), 4), layout="constrained")
    figure.suptitle(title)
    for axis, panel in zip(axes[:-1], view, strict=True):
        _draw_panel(axis, panel, metrics)
    _draw_phases(axes[-1], metrics)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_panel(axis: Any, panel: Panel, metrics: MetricsLog) -> None:
    drawn: list[float] = []
    for curve in panel.curves:
        line, (steps, values) = "o--" if curve.held_out else "-", metrics.series(curve.metric)
        axis.plot(steps, values, line, label=curve.label, color=curve.colour)
        drawn += values
    axis.set(title=panel.title, xlabel="step")
    # A reward may be any number.
    if panel.limits and all(panel.limits[0] <= value <= panel.limits[1] for value in drawn):
        axis.set(ylim=panel.limits)
    if len(panel.curves) > 1:
        axis.legend()


def _draw_phases(axis: Any, metrics: MetricsLog) -> None:
    steps, _ = metrics.series("timing/train/total_step_time")
    logged = {name for entry in metrics.history for name in entry}
    stacks = {
        phase: [sum(values) for values in zip(*(_timer(metrics, name, len(steps)) for name in timers), strict=True)]
        for phase, (timers, _) in phases_in(name.removeprefix("timing/train/") for name in logged).items()
    }
    axis.stackplot(steps, list(stacks.values()), labels=list(stacks), alpha=0.85)
    axis.set(title="seconds a step, by phase", xlabel="step")
    axis.legend(loc="upper right", fontsize="small")


def _timer(metrics: MetricsLog, name: str, count: int) -> list[float]:
    _, values = metrics.series(f"timing/train/{name}")
    return values if len(values) == count else [0.0] * count
