"""The interface of a tracker."""

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
    """Receives a run's metrics, and ignores what it cannot show."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of one step."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples of the step's rollout, ordered from the lowest reward to the highest."""

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        """Log the summary of a run that is done."""

    def close(self) -> None:
        """Write what is still in memory."""
