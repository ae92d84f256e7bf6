"""What a tracker is: one place that metrics go to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_lite.observability.samples import Sample

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Chart:
    """A bar for each row: its label, and its value in the last column."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str | float | None, ...]]


class Sink:
    """One place that metrics go to. It ignores what it cannot show."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Metrics of one step."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A few samples of the step's rollout, from the worst to the best."""

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        """The run as a whole, when it is done."""

    def close(self) -> None:
        """Bring everything to where it belongs."""
