"""Which metrics an algorithm is judged by: the rows of a run's table and the curves of its picture."""

from dataclasses import dataclass

from nemo_rl_lite.config.algorithms import ALGORITHMS, imported


@dataclass(frozen=True)
class Curve:
    """One metric: its label, its decimals in the table, its colour in the picture."""

    metric: str
    label: str
    decimals: int
    colour: str

    @property
    def held_out(self) -> bool:
        """Whether it is measured at validations only, before the first step (as step 0) and between steps."""
        return self.metric.startswith("validation/")


@dataclass(frozen=True)
class Panel:
    """Curves that share a vertical axis; `limits` are that axis's, where they are known."""

    title: str
    curves: tuple[Curve, ...]
    limits: tuple[float, float] | None = None


View = tuple[Panel, ...]

REWARD: View = (
    Panel(
        "reward",
        (
            Curve("validation/accuracy", "held-out accuracy", 3, "tab:orange"),
            Curve("train/reward", "training reward", 3, "tab:blue"),
        ),
        limits=(0, 1.02),
    ),
    Panel(
        "KL to the starting policy (nats a token)",
        (Curve("train/kl_penalty", "KL to the start", 4, "tab:red"),),
    ),
)
PREFERENCE: View = (
    Panel(
        "preference accuracy",
        (
            Curve("validation/accuracy", "held-out accuracy", 3, "tab:orange"),
            Curve("train/accuracy", "training accuracy", 3, "tab:blue"),
        ),
        limits=(0, 1.02),
    ),
    Panel(
        "loss",
        (
            Curve("validation/val_loss", "held-out loss", 4, "tab:orange"),
            Curve("train/loss", "training loss", 4, "tab:blue"),
        ),
    ),
    Panel("reward margin", (Curve("train/rewards_margin_mean", "reward margin", 3, "tab:green"),)),
)
LOSS: View = (
    Panel(
        "loss (nats a response token)",
        (
            Curve("validation/val_loss", "held-out loss", 4, "tab:orange"),
            Curve("train/loss", "training loss", 4, "tab:blue"),
        ),
    ),
    Panel("gradient norm", (Curve("train/grad_norm", "gradient norm", 3, "tab:red"),)),
)


def view_of(algorithm: str) -> View:
    """The view of the algorithm of this name."""
    return imported(ALGORITHMS[algorithm].view)
