"""One run of an algorithm, whichever it is."""

from pathlib import Path
from typing import Protocol

from nemo_rl_lite.checkpoint.resume import Start
from nemo_rl_lite.config.algorithms import algorithm_of, imported
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.metrics_log import MetricsLog
from nemo_rl_lite.run.workers.launch import Reserved


class Job(Protocol):
    """Has read and checked its data when it is made; starts workers when it runs."""

    def run(self, metrics: MetricsLog, reserved: Reserved, start: Start) -> dict[str, int]:
        """Train in the reserved processes from `start` on; returns the workers' peak memory in bytes, by name."""
        ...


def make_job(config: Config, folder: Path, console: RunConsole) -> Job:
    """The job that `algorithm.name` means, for a run in `folder`.

    Raises:
        ConfigError: the model cannot be had, or lacks something.
        DataError: naming file, row and what is wrong.
    """
    return imported(algorithm_of(config).job)(config, folder, console)
