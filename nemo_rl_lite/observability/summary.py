"""Summary of a finished run (tables on the terminal, and summary.json), and the curves of each algorithm."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median

from nemo_rl_lite.config.algorithms import ALGORITHMS
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability.console import ENGINES_IDLE, PHASES, RunConsole, phases_in
from nemo_rl_lite.observability.sinks import Chart
from nemo_rl_lite.observability.trackers import MetricsLog

SUMMARY_FILE = "summary.json"
PREDICTED, MEASURED = "memory/predicted/", "memory/measured/"
LAST_STEPS = 5
"""Measured memory is the mean over this many last steps, when everything is allocated."""
GIB = 2**30
# By phase: the GPU's limit, and the metric of its reached share.
_LIMITS = {
    "generate": ("bandwidth", "performance/generation_bandwidth_share"),
    "logprob": ("bf16 peak", "performance/policy_and_reference_logprobs_fp_utilization"),
    "train": ("bf16 peak", "performance/train_fp_utilization"),
}


@dataclass(frozen=True)
class Curve:
    """A metric with its label and its decimals in tables."""

    metric: str
    label: str
    decimals: int

    @property
    def held_out(self) -> bool:
        """True if validations measure it, the first one as step 0."""
        return self.metric.startswith("validation/")


@dataclass(frozen=True)
class Panel:
    """Curves that share a vertical axis. Tables show only results."""

    title: str
    curves: tuple[Curve, ...]
    is_result: bool = True


View = tuple[Panel, ...]
_ACCURACY = Curve("validation/accuracy", "held-out accuracy", 3)
_HELD_OUT_REWARD = Curve("validation/accuracy", "held-out reward", 3)
_REWARD = Curve("train/reward", "training reward", 3)
_TRAINING_ACCURACY = Curve("train/accuracy", "training accuracy", 3)
_KL = Curve("train/kl_penalty", "KL to the reference", 4)
_MARGIN = Curve("train/rewards_margin_mean", "reward margin", 3)
_GRADIENT_NORM = Curve("train/grad_norm", "gradient norm", 3)
_LOSSES = (
    Curve("validation/val_loss", "held-out loss", 4),
    Curve("train/loss", "training loss", 4),
)
_LENGTH = Curve("train/mean_gen_tokens_per_sample", "response length", 1)
_SHARES = (
    Curve("train/baseline_reward/pct_mixed", "prompts with mixed rewards", 3),
    Curve("train/truncation_rate", "truncated responses", 3),
)
_CLIPPED = (Curve("train/clip_ratio/low", "clipped below", 4), Curve("train/clip_ratio/high", "clipped above", 4))
_NORM = Panel("gradient norm", (_GRADIENT_NORM,), is_result=False)
_ROLLOUTS = (
    Panel("response length (tokens)", (_LENGTH,)),
    Panel("mixed prompts and truncated responses (share)", _SHARES, is_result=False),
    Panel("entropy (nats per token)", (Curve("train/entropy", "entropy", 3),), is_result=False),
    _NORM,
    Panel("clipped tokens (share)", _CLIPPED, is_result=False),
)
REWARD: View = (
    Panel("reward", (_HELD_OUT_REWARD, _REWARD)),
    Panel("KL to the reference policy (nats per token)", (_KL,)),
    *_ROLLOUTS,
)
PREFERENCE: View = (
    Panel("preference accuracy", (_ACCURACY, _TRAINING_ACCURACY)),
    Panel("loss", _LOSSES),
    Panel("reward margin", (_MARGIN,)),
    _NORM,
)
UNPAIRED: View = (Panel("loss", _LOSSES), Panel("reward margin", (_MARGIN,)), _NORM)
TEACHER: View = (
    Panel("KL to the teacher (nats per token)", (Curve("train/teacher_kl", "KL to the teacher", 4),)),
    Panel("reward", (_HELD_OUT_REWARD, _REWARD)),
    *_ROLLOUTS,
)
LOSS: View = (Panel("loss (nats per response token)", _LOSSES), _NORM)


@dataclass(frozen=True)
class Waits:
    """Medians over steps of the waits in an asynchronous run."""

    policy_seconds: float
    """Seconds until the rollout was complete."""
    engines_seconds: float
    """Seconds in which no engine had a request."""
    token_age: float
    """Mean staleness of tokens, in steps."""


@dataclass(frozen=True)
class Summary:
    """Content of summary.json.

    Held-out accuracies, rewards and losses (nats per token) are from before the first and after the last step; None if
    not measured. Seconds are medians over steps.
    """

    run_folder: str
    steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    reward_before: float | None
    reward_after: float | None
    val_loss_before: float | None
    val_loss_after: float | None
    seconds_a_step: float
    seconds_by_phase: dict[str, float]
    peak_memory_bytes: dict[str, int]
    waits: Waits | None = None
    """None in synchronous runs."""
    limit_shares: dict[str, float] = field(default_factory=dict)
    """By phase, the reached share of the GPU's bfloat16 peak, or of its memory bandwidth in generation: medians over
    steps. Empty if the limits are unknown."""
    advice: Sequence[str] = ()
    """See `WeakSignals.at_end`."""


def view_of(algorithm: str, held_out: str) -> View:
    """Return the view of an algorithm. `held_out`: the label of the mean reward on held-out problems."""
    own = replace(_HELD_OUT_REWARD, label=held_out)
    panels: View = imported(ALGORITHMS[algorithm].view)
    return tuple(
        replace(panel, curves=tuple(own if curve == _HELD_OUT_REWARD else curve for curve in panel.curves))
        for panel in panels
    )


def summarize(
    metrics: MetricsLog, run_folder: Path, peak_memory: Mapping[str, int], view: View, advice: Sequence[str] = ()
) -> Summary:
    """Summarize the metrics. Raises LauncherError: no step was taken."""
    steps, totals = metrics.series("timing/train/total_step_time")
    if not steps:
        reason = "the checkpoint that the run resumed from has all steps"
        raise LauncherError(f"no step was left: {reason}; set a larger algorithm.max_num_steps")
    timers = {name.removeprefix("timing/train/") for entry in metrics.history for name in entry}
    measured, nothing = _held_out(metrics, "validation/accuracy"), (None, None)
    is_accuracy = any(_ACCURACY in panel.curves for panel in view)
    (accuracy_before, accuracy_after), (reward_before, reward_after) = (
        (measured, nothing) if is_accuracy else (nothing, measured)
    )
    val_loss_before, val_loss_after = _held_out(metrics, "validation/val_loss")
    names = ("timing/train/generation", ENGINES_IDLE, "train/trajectory_age_mean")
    waited = [metrics.series(name)[1] for name in names]

    def typical(names: tuple[str, ...]) -> float:
        columns = [metrics.series(f"timing/train/{name}")[1] for name in names if name in timers]
        return median(sum(values) for values in zip(*columns, strict=True))

    return Summary(
        run_folder=str(run_folder),
        steps=len(steps),
        accuracy_before=accuracy_before,
        accuracy_after=accuracy_after,
        reward_before=reward_before,
        reward_after=reward_after,
        val_loss_before=val_loss_before,
        val_loss_after=val_loss_after,
        seconds_a_step=median(totals),
        seconds_by_phase={phase: typical(names) for phase, (names, _) in phases_in(timers).items()},
        peak_memory_bytes=dict(peak_memory),
        waits=Waits(*map(median, waited)) if all(waited) else None,
        limit_shares={
            phase: median(values) for phase, (_, name) in _LIMITS.items() if (values := metrics.series(name)[1])
        },
        advice=advice,
    )


def show_summary(summary: Summary, metrics: MetricsLog, console: RunConsole, title: str, view: View) -> None:
    """Write summary.json and print its tables."""
    folder = Path(summary.run_folder)
    (folder / SUMMARY_FILE).write_text(json.dumps(asdict(summary), indent=2) + "\n")
    results = [curve for panel in view if panel.is_result for curve in panel.curves]
    rows = [row for curve in results if (row := _row(curve, metrics))]
    console.table(title, ("", "at the start", "at the end"), rows)
    headers, shares = ("phase", "s", "GPU") if summary.limit_shares else ("phase", "s"), summary.limit_shares
    phases = []
    for phase, seconds in (summary.seconds_by_phase | {"step": summary.seconds_a_step}).items():
        reached = f"{shares[phase]:.0%} of the {_LIMITS[phase][0]}" if phase in shares else ""
        phases.append((phase, f"{seconds:.3f}", reached)[: len(headers)])
    console.table("median seconds per step", headers, phases)
    if waits := summary.waits:
        waited = [("policy waited", waits.policy_seconds), ("engines were idle", waits.engines_seconds)]
        rows = [(what, f"{seconds:.3f} s") for what, seconds in waited]
        rows.append(("mean staleness", f"{waits.token_age:.2f} steps"))
        console.table("asynchronous rollouts", ("", "median"), rows)
    for sentence in summary.advice:
        console.say(sentence)
    for label, written in (("model", folder / "hf"), ("adapter", folder / "adapter")):
        if written.is_dir():
            console.say(f"{label:<8} {written}")
    console.say(f"run      {folder}")


def tracked(summary: Summary) -> dict[str, float]:
    """Return the summary's numbers by name, for trackers."""
    numbers = {name: value for name, value in asdict(summary).items() if isinstance(value, (int, float))}
    phases = {f"seconds_by_phase/{phase}": seconds for phase, seconds in summary.seconds_by_phase.items()}
    waits = {f"waits/{name}": value for name, value in asdict(summary.waits).items()} if summary.waits else {}
    memory = {f"peak_memory_gb/{worker}": nbytes / GIB for worker, nbytes in summary.peak_memory_bytes.items()}
    shares = {f"limit_shares/{phase}": share for phase, share in summary.limit_shares.items()}
    return numbers | phases | waits | memory | shares


def charts(summary: Summary, metrics: MetricsLog) -> list[Chart]:
    seconds = list(summary.seconds_by_phase.items())
    predicted, measured = stacks(metrics, PREDICTED), stacks(metrics, MEASURED)
    residency = [
        (f"{phase}: {component.replace('_', ' ')}", there / GIB if there is not None else None, nbytes / GIB)
        for phase in PHASES
        for component, nbytes in measured.get(phase, {}).items()
        for there in [predicted.get(phase, {}).get(component)]
    ]
    return [
        Chart("phases", "median seconds per step, by phase", ("phase", "seconds"), seconds),
        Chart("residency", "device memory by phase", ("what", "predicted GiB", "measured GiB"), residency),
    ]


def stacks(metrics: MetricsLog, prefix: str) -> dict[str, dict[str, float]]:
    """Return the means of the metrics `<prefix><phase>/<component>` over the last steps, by phase and component."""
    names = dict.fromkeys(name for entry in metrics.history for name in entry if name.startswith(prefix))
    found: dict[str, dict[str, float]] = {}
    for name in names:
        phase, component = name.removeprefix(prefix).split("/")
        _, values = metrics.series(name)
        found.setdefault(phase, {})[component] = mean(values[-LAST_STEPS:])
    return found


def _row(curve: Curve, metrics: MetricsLog) -> tuple[str, str, str] | None:
    if curve.held_out:
        before, after = _held_out(metrics, curve.metric)
    else:
        _, values = metrics.series(curve.metric)
        before, after = (values[0], values[-1]) if values else (None, None)
    if before is None or after is None:
        return None
    return curve.label, f"{before:.{curve.decimals}f}", f"{after:.{curve.decimals}f}"


def _held_out(metrics: MetricsLog, name: str) -> tuple[float | None, float | None]:
    """Return a validation metric before the first and after the last step."""
    values = dict(zip(*metrics.series(name), strict=True))
    steps, _ = metrics.series("timing/train/total_step_time")
    return values.get(0), values.get(steps[-1])
