"""Metrics and samples for TensorBoard, in the run's folder."""

import logging
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_lite.observability.samples import Sample
from nemo_rl_lite.observability.sink import Chart, Metrics, Sink

log = logging.getLogger(__name__)


class TensorBoard(Sink):
    def __init__(self, folder: Path, done: int):
        """Hide what the folder has of steps after `done`, which will be repeated."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        try:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
        # The writer's thread failed, as on a full disk; metrics.jsonl has all metrics.
        except OSError as error:
            log.warning("TensorBoard did not get everything: %s", error)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [(sample.prompt, sample.response, f"{sample.reward:.3g}") for sample in samples]
        self._writer.add_text("rollouts", _as_text(("prompt", "response", "reward"), rows), step)

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        for chart in charts:
            rows = [tuple("" if value is None else str(value) for value in row) for row in chart.rows]
            self._writer.add_text(chart.title, _as_text(chart.columns, rows))

    def close(self) -> None:
        self._writer.close()


def _as_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose cells are escaped, because a model wrote them."""
    cells = [[_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(columns), ["---"] * len(columns), *cells])


def _cell(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")
