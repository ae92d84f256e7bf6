"""Device memory by phase and component, predicted beside measured, as one picture."""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from nemo_rl_lite.observability.console import PHASES
from nemo_rl_lite.observability.metrics_log import MetricsLog

PREDICTED, MEASURED = "memory/predicted/", "memory/measured/"
# Measured values are means over so many steps at the end of the run, when everything has been allocated.
LAST_STEPS = 5
# What was measured and belongs to no component: CUDA contexts, captured graphs, buffers, engines asleep.
OTHER = "other"
GIB, MIB = 2**30, 2**20
_WIDTH = 0.38

# Phase -> component -> bytes.
Stacks = Mapping[str, Mapping[str, float]]


def plot_memory(metrics: MetricsLog, path: Path, title: str) -> bool:
    """Two stacked bars a phase, predicted and measured, as a PNG at `path`. Draws nothing and returns False where
    nothing was measured."""
    measured = stacks(metrics, MEASURED)
    if not measured:
        return False
    # On CPUs engines and activations are not measured: their predictions would have nothing beside them.
    known = {component for parts in measured.values() for component in parts}
    predicted = {
        phase: {name: nbytes for name, nbytes in parts.items() if name in known}
        for phase, parts in stacks(metrics, PREDICTED).items()
    }
    unit, scale = ("GiB", GIB) if _largest(predicted, measured) >= GIB else ("MiB", MIB)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    phases = [phase for phase in PHASES if phase in predicted or phase in measured]
    colours = _colours(predicted, measured)
    figure, axis = plt.subplots(figsize=(2.2 * len(phases) + 3, 4.5), layout="constrained")
    for half, hatch, bars in ((-1, "///", predicted), (1, "", measured)):
        for place, phase in enumerate(phases):
            bottom = 0.0
            for component, colour in colours.items():
                height = bars.get(phase, {}).get(component, 0.0) / scale
                x = place + half * _WIDTH / 2
                axis.bar(x, height, _WIDTH, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
                bottom += height
    axis.set_xticks(range(len(phases)), phases)
    axis.set(title=f"{title}: device memory, predicted (hatched) and measured", ylabel=unit)
    # The order of the stack, from above.
    handles = [Patch(color=colour, label=name.replace("_", " ")) for name, colour in reversed(colours.items())]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
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


def _largest(*bars: Stacks) -> float:
    """Bytes of the tallest stack."""
    return max((sum(parts.values()) for phases in bars for parts in phases.values()), default=0.0)


def _colours(*bars: Stacks) -> dict[str, str]:
    """A colour for each component that takes anything, in the order of the stack; what is left over lies on top."""
    names = dict.fromkeys(name for phases in bars for parts in phases.values() for name in parts)
    taken = [name for name in names if any(parts.get(name) for phases in bars for parts in phases.values())]
    named = {name: f"C{index}" for index, name in enumerate(name for name in taken if name != OTHER)}
    return named | ({OTHER: "lightgrey"} if OTHER in taken else {})
