"""Pictures of a run from its metrics."""

from pathlib import Path

from nemo_rl_lite.observability.console import PHASES
from nemo_rl_lite.observability.sinks import MetricsLog


def plot_run(metrics: MetricsLog, path: Path, title: str) -> None:
    """Reward, KL and phase times over steps, as one PNG at `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (reward, kl, phases) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    figure.suptitle(title)
    reward.plot(*metrics.series("train/reward"), label="training", color="tab:blue")
    reward.plot(*metrics.series("validation/accuracy"), "o--", label="held out", color="tab:orange")
    reward.set(title="reward", xlabel="step", ylim=(0, 1.02))
    reward.legend(loc="lower right")
    kl.plot(*metrics.series("train/kl_penalty"), color="tab:red")
    kl.set(title="KL to the starting policy (nats a token)", xlabel="step")
    steps, _ = metrics.series("timing/train/total_step_time")
    stacks = {
        phase: [sum(values) for values in zip(*(_timer(metrics, name, len(steps)) for name in timers), strict=True)]
        for phase, (timers, _) in PHASES.items()
    }
    phases.stackplot(steps, list(stacks.values()), labels=list(stacks), alpha=0.85)
    phases.set(title="seconds a step, by phase", xlabel="step")
    phases.legend(loc="upper right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _timer(metrics: MetricsLog, name: str, count: int) -> list[float]:
    _, values = metrics.series(f"timing/train/{name}")
    return values if len(values) == count else [0.0] * count
