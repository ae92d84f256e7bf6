"""What a run leaves behind: a table on the terminal, a picture, a summary for machines."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from nemo_rl_lite.observability.console import PHASES, RunConsole
from nemo_rl_lite.observability.plots import plot_run
from nemo_rl_lite.observability.sinks import MetricsLog

SUMMARY_FILE = "summary.json"
PICTURE = Path("plots") / "run.png"


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Accuracies are those before the first and after the last step, None where
    the run did not validate there; seconds are medians over steps."""

    run_folder: str
    steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    seconds_a_step: float
    seconds_by_phase: dict[str, float]
    peak_memory_bytes: dict[str, int]


def summarize(metrics: MetricsLog, run_folder: Path, peak_memory: Mapping[str, int]) -> Summary:
    accuracies = dict(zip(*metrics.series("validation/accuracy"), strict=True))
    steps, totals = metrics.series("timing/train/total_step_time")

    def typical(timers: tuple[str, ...]) -> float:
        columns = [metrics.series(f"timing/train/{timer}")[1] for timer in timers]
        return median(sum(values) for values in zip(*columns, strict=True))

    return Summary(
        run_folder=str(run_folder),
        steps=len(steps),
        accuracy_before=accuracies.get(0),
        accuracy_after=accuracies.get(steps[-1]),
        seconds_a_step=median(totals),
        seconds_by_phase={phase: typical(timers) for phase, (timers, _) in PHASES.items()},
        peak_memory_bytes=dict(peak_memory),
    )


def report(summary: Summary, metrics: MetricsLog, console: RunConsole, title: str, plots: bool) -> None:
    """Print the table, draw the picture, write summary.json."""
    folder = Path(summary.run_folder)
    (folder / SUMMARY_FILE).write_text(json.dumps(asdict(summary), indent=2) + "\n")
    _, rewards = metrics.series("train/reward")
    _, kl = metrics.series("train/kl_penalty")
    rows = [("training reward", f"{rewards[0]:.3f}", f"{rewards[-1]:.3f}")]
    if kl:
        rows.append(("KL to the start", f"{kl[0]:.4f}", f"{kl[-1]:.4f}"))
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        rows.insert(0, ("held-out accuracy", f"{summary.accuracy_before:.3f}", f"{summary.accuracy_after:.3f}"))
    console.table(title, ("", "at the start", "at the end"), rows)
    phases = [(phase, f"{seconds:.3f}") for phase, seconds in summary.seconds_by_phase.items()]
    console.table("median seconds a step", ("phase", "s"), [*phases, ("whole step", f"{summary.seconds_a_step:.3f}")])
    if plots:
        plot_run(metrics, folder / PICTURE, title)
        console.say(f"picture  {folder / PICTURE}")
    console.say(f"run      {folder}")
