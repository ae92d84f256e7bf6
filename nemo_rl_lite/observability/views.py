"""The metrics that show how an algorithm does: the rows of a run's last table and the first curves of its report."""

from dataclasses import dataclass

from nemo_rl_lite.config.algorithms import ALGORITHMS
from nemo_rl_lite.config.user_code import imported


@dataclass(frozen=True)
class Curve:
    """One metric, its label, and its decimals in the table."""

    metric: str
    label: str
    decimals: int

    @property
    def held_out(self) -> bool:
        """Whether only validations measure it: before the first step (as step 0) and between steps."""
        return self.metric.startswith("validation/")


@dataclass(frozen=True)
class Panel:
    """Curves that share a vertical axis, and the limits of that axis where they are known."""

    title: str
    curves: tuple[Curve, ...]
    limits: tuple[float, float] | None = None


View = tuple[Panel, ...]
_ACCURACY = Curve("validation/accuracy", "held-out accuracy", 3)
_REWARD = Curve("train/reward", "training reward", 3)
_TRAINING_ACCURACY = Curve("train/accuracy", "training accuracy", 3)
_KL = Curve("train/kl_penalty", "KL to the start", 4)
_MARGIN = Curve("train/rewards_margin_mean", "reward margin", 3)
_GRADIENT_NORM = Curve("train/grad_norm", "gradient norm", 3)
_LOSSES = (
    Curve("validation/val_loss", "held-out loss", 4),
    Curve("train/loss", "training loss", 4),
)
REWARD: View = (
    Panel("reward", (_ACCURACY, _REWARD), limits=(0, 1.02)),
    Panel("KL to the starting policy (nats a token)", (_KL,)),
)
PREFERENCE: View = (
    Panel("preference accuracy", (_ACCURACY, _TRAINING_ACCURACY), limits=(0, 1.02)),
    Panel("loss", _LOSSES),
    Panel("reward margin", (_MARGIN,)),
)
UNPAIRED: View = (Panel("loss", _LOSSES), Panel("reward margin", (_MARGIN,)))
TEACHER: View = (
    Panel("KL to the teacher (nats a token)", (Curve("train/teacher_kl", "KL to the teacher", 4),)),
    Panel("reward", (_ACCURACY, _REWARD), limits=(0, 1.02)),
)
LOSS: View = (Panel("loss (nats a response token)", _LOSSES), Panel("gradient norm", (_GRADIENT_NORM,)))


def view_of(algorithm: str) -> View:
    """The view of the algorithm of this name."""
    return imported(ALGORITHMS[algorithm].view)
