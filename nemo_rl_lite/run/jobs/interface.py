"""What a job is: one run of an algorithm."""

from pathlib import Path
from typing import Protocol

from nemo_rl_lite.checkpoint.resume import Start
from nemo_rl_lite.config.algorithms import algorithm_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.metrics_log import MetricsLog
from nemo_rl_lite.run.workers.launch import Reserved


class Job(Protocol):
    """Reads and checks its data in the constructor, and starts workers in `run`."""

    def run(self, metrics: MetricsLog, reserved: Reserved, start: Start) -> dict[str, int]:
        """Train in the reserved processes, beginning at `start`; returns each worker's peak memory in bytes."""
        ...


def make_job(config: Config, folder: Path, console: RunConsole) -> Job:
    """Make the job of the configured algorithm for a run in `folder`.

    Raises:
        ConfigError: the model cannot be found or downloaded, or is incomplete.
        DataError: the data is unusable; the message names file, row and cause.
    """
    return imported(algorithm_of(config).job)(config, folder, console)
